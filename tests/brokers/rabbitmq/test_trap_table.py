"""Where each flaw of a usual RabbitMQ design, each rule of safety and each trap is tested.
F: a flaw, R: a rule of tokens, T: a trap.

F1   a failure returns the message, so its attempts are never counted
     test_work_app::test_an_event_that_always_fails_is_retried_and_becomes_a_dead_letter
     test_work_app::test_members_share_events_and_count_the_attempts_of_each_together
     test_work_faults::test_a_cut_while_a_record_is_stored_loses_nothing
     test_work_faults::test_cuts_do_not_multiply_the_attempts_of_failing_events
     test_foreign_queues::test_plain_messages_are_handled_retried_and_replayed_in_their_own_queue
F2   no pause between two attempts
     test_work_app::test_an_event_that_always_fails_is_retried_and_becomes_a_dead_letter
     test_work_queue::test_a_rung_brings_messages_back_to_their_queue
     test_rungs::test_a_wait_is_never_too_short_and_at_most_a_tenth_too_long
     test_flaws::test_a_short_retry_does_not_wait_behind_a_long_one
F3   a time to live deletes events that wait for their first attempt
     test_traps::test_no_queue_of_ours_has_a_limit_that_deletes_messages
     test_topology::test_a_queue_that_deletes_unhandled_messages_is_refused_unless_it_may
     test_failure_suite::TestRabbitMQWorkFailure::test_an_expired_event_becomes_a_dead_letter_when_its_turn_comes
F4   a full queue deletes its oldest messages
     test_flaws::test_a_full_queue_refuses_new_events_and_keeps_the_old_ones
     test_topology::test_a_queue_has_the_arguments_that_keep_messages
     test_topology::test_a_queue_that_deletes_unhandled_messages_is_refused_unless_it_may
F5   retries come back to a full queue. Our work queues have no limit; docs/rabbitmq.md warns of one on declared queues
     test_traps::test_no_queue_of_ours_has_a_limit_that_deletes_messages
     test_checkup::test_what_a_policy_does_to_our_queues
F6   classic queues
     test_traps::test_no_queue_of_ours_has_a_limit_that_deletes_messages
     test_topology::test_a_queue_has_the_arguments_that_keep_messages
     test_message::test_the_properties_say_to_other_programs_what_the_event_is
     test_work_queue::test_a_message_is_sent_again_with_all_that_belongs_to_it
     test_work_queue::test_a_classic_queue_does_not_count_so_one_return_makes_a_suspect
F7   priorities within a queue
     test_topology::test_a_wrong_declaration_is_refused_where_it_is_written
     test_work_app::test_tiers_are_one_queue_each_and_urgent_events_overtake_others
     test_tiers::test_full_tiers_share_8_to_3_to_1
     test_tiers::test_bulk_is_never_starved
F8   a prefetch that equals the concurrency
     test_flaws::test_a_member_gets_twice_as_many_events_as_it_runs_at_once
     test_work_queue::test_the_prefetch_follows_from_the_concurrency
     test_work_queue::test_the_prefetch_stays_small_after_messages_came_back
F9   publishing without confirms, and to routes without a queue
     test_publishing::test_an_outbound_message_is_mandatory
     test_publishing::TestOnAServer::test_a_returned_event_is_refused_and_named
     test_flaws::test_an_event_that_no_queue_takes_is_refused_or_goes_to_the_alternate_exchange
     test_outages::test_a_node_that_is_killed_under_load_loses_nothing
     test_topology_server::test_the_routes_of_the_seed_lead_to_its_queues
F10  a replay that acknowledges before its copy is stored, and copies only a part
     test_work_faults::test_a_cut_while_a_letter_is_replayed_loses_nothing
     test_faults::test_a_connection_cut_during_a_replay_loses_no_letter
     test_foreign_queues::test_a_replayed_message_has_all_its_properties
     test_work_app::test_a_replay_runs_again_in_its_group_only
     test_failure_suite::TestRabbitMQFailure::test_a_replay_keeps_to_its_rate_and_can_be_stopped
F11  every replay goes to the same route
     test_work_app::test_a_replay_runs_again_in_its_group_only
     test_foreign_queues::test_a_replay_goes_only_to_the_queue_of_its_group
F12  a guessed name of the queue for dead letters, and an error that counts as success
     test_foreign_queues::test_operators_find_the_group_and_its_dead_letters_without_the_application
     test_flaws::test_a_replay_that_the_server_refuses_loses_nothing_and_runs_once_when_it_can
     test_aside::TestOperators::test_a_move_whose_connection_is_lost_is_counted_once
     test_aside::TestOperators::test_a_closed_broker_raises_instead_of_hanging
F13  a replay that cannot publish takes the same letter again and again
     test_flaws::test_a_replay_that_the_server_refuses_loses_nothing_and_runs_once_when_it_can
F14  dead letters of a queue have no route
     test_topology::test_a_dead_letter_target_that_is_missing_or_unbound_is_refused
     test_topology_cli::test_a_missing_dead_letter_route_is_refused_by_plan_and_an_error_of_doctor
     test_operations::test_a_deleted_queue_and_a_lost_route_are_found
     test_topology_server::test_a_rejected_message_reaches_the_dead_letter_queue
F15  each process declares queues with its own arguments
     test_topology_server::test_each_argument_that_differs_is_named
     test_topology_server::test_without_compare_the_questions_are_passive
     test_topology_cli::test_drift_is_refused_and_names_the_argument
     test_topology_cli::test_an_application_with_a_refused_topology_does_not_start
F16  a reconnect that brings back a part
     test_faults::test_a_connection_cut_at_any_step_loses_and_inverts_nothing
     test_outages::test_a_node_that_is_killed_under_load_loses_nothing
     test_work_routes::test_an_exchange_that_was_deleted_is_declared_again_with_its_bindings
     test_suite::TestRabbitMQ::test_a_settle_of_an_old_epoch_has_no_effect
     test_suite_owners::TestRabbitMQOwners::test_a_settle_under_an_old_epoch_has_no_effect_and_returns_the_partition
     test_flaws::test_pauses_grow_to_five_seconds_never_end_and_differ
F17  connected, not consuming, and healthy
     test_work_faults::test_an_unreachable_server_is_a_trouble_until_it_is_back
     test_work_routes::test_a_deleted_queue_is_a_trouble_until_it_is_consumed_again
     test_outages::test_a_node_that_stops_for_a_while_is_noticed_and_nothing_is_lost
     test_outages::test_a_stream_that_is_deleted_refuses_its_events_and_is_named
     test_membership::test_an_unexpected_error_is_a_trouble_and_is_tried_again
F18  a stop fails the events that run, and charges them
     test_traps::test_handlers_that_stop_finish_what_they_began_and_the_next_member_repeats_nothing
     test_work_app::test_stopping_again_and_again_charges_nothing
     test_work_app::test_the_next_member_handles_the_events_and_retries_of_a_stopped_one
F19  an event that is delivered twice has its effect twice
     test_traps::test_with_an_inbox_an_event_that_is_delivered_twice_has_its_effect_once
     failure/test_watch::test_one_alert_above_the_threshold_and_one_all_clear_well_below_it
F20  a handler that runs longer than consumer_timeout
     test_work_app::test_a_handler_without_a_time_limit_is_refused
     test_work_queue::test_a_call_that_may_take_longer_than_consumer_timeout_is_refused
     test_work_queue::test_calls_that_may_take_long_leave_no_message_waiting_for_too_long
     test_checkup::test_too_few_consumers_and_a_short_consumer_timeout_are_reported
F21  a failed probe of a depth ends the alerts in silence
     test_figures::test_depths_consumers_and_failed_probes_are_seen
     test_figures::test_a_lost_connection_is_a_failed_probe_and_the_next_look_recovers
     test_figures::test_an_unknown_depth_is_no_depth
     failure/test_watch::test_a_check_that_fails_is_an_alert_and_its_end_an_all_clear
F22  dead letters are deleted after a week. Removing secrets from events is the application's part
     test_traps::test_no_queue_of_ours_has_a_limit_that_deletes_messages
     test_topology::test_a_queue_that_deletes_unhandled_messages_is_refused_unless_it_may
     test_aside_suite::TestRabbitMQAside::test_a_record_survives_the_removal_of_its_event_from_the_log
F23  no contract of the messages. The types of payloads are the application's part; a handler's annotation checks them
     test_message::test_an_event_survives_as_a_message
     test_message::test_the_properties_say_to_other_programs_what_the_event_is
     test_bad_input::test_messages_that_are_no_events_are_handled_or_become_dead_letters
F24  the routing key of critical notifications leads to no queue
     test_topology_server::test_the_routes_of_the_seed_lead_to_its_queues
     test_topology::test_each_message_of_a_queue_with_tiers_is_in_one_queue
     test_tiers::test_every_event_is_in_one_queue
     test_work_app::test_tiers_are_one_queue_each_and_urgent_events_overtake_others
F25  metrics that nobody counts
     test_figures::test_an_application_counts_what_it_publishes_and_handles
     test_figures::test_with_its_prefix_the_metrics_of_the_seed_have_their_exact_names
R1   a takeover needs a probe as a barrier, or it takes an older token
     test_token::test_the_first_delivery_makes_it_send_a_probe_and_the_probe_ends_the_search
     test_token::test_kills_stops_and_late_writes_neither_lose_a_settle_nor_make_two_owners
     test_token::test_the_checks_find_that_the_probe_is_missing
     test_seat::test_many_leftovers_do_not_stop_a_takeover
R2   a confirm proves no ownership: a settle counts when its token was delivered back
     test_flaws::test_a_token_that_is_confirmed_and_not_delivered_back_is_not_stored
     test_token::test_a_claim_counts_when_it_comes_back_and_then_the_rest_is_acknowledged
     test_token::test_the_checks_find_that_a_confirm_was_taken_for_a_proof
     test_cluster::test_a_late_token_of_a_former_owner_has_no_effect
R3   the server gives the token on at once, so a new owner waits for the lease after an unclean token
     test_flaws::test_an_owner_that_is_cut_off_is_not_sure_any_more_when_the_next_one_begins
     test_membership::test_a_new_owner_waits_for_the_lease_in_the_token_not_for_its_own
     test_token::test_the_checks_find_that_an_owner_did_not_wait
     test_cluster::test_an_owner_that_is_cut_off_starts_nothing_after_its_lease
     test_suite_owners::TestRabbitMQOwners::test_no_other_member_is_assigned_before_the_owners_sure_until
R4   progress is anchored in the log, which may have lost its end
     test_membership::test_a_log_that_has_lost_its_end_has_a_new_id_and_skips_no_event
     test_membership::test_a_log_without_any_valid_anchor_is_read_from_its_beginning
     test_log_reader::test_a_check_knows_the_same_log_and_one_that_lost_its_end
     test_cut_log::test_events_of_a_log_that_lost_its_end_run_again_and_none_is_skipped
T1   a limit of deliveries deletes a token or an event
     test_traps::test_no_queue_of_ours_has_a_limit_that_deletes_messages
     test_checkup::test_the_facts_of_a_real_server
T2   a name under which there is something else
     test_bad_input::test_a_thing_of_another_kind_under_our_name_is_named_with_the_cure
T3   a late token of a former owner
     test_seat::test_a_late_lower_token_of_a_former_owner_changes_nothing
     test_membership::test_a_late_lower_token_does_not_disturb_the_owner
T4   an equal or higher token of another member
     test_seat::test_an_equal_or_higher_token_of_another_member_ends_the_ownership
     test_membership::test_a_higher_token_of_another_member_fences_the_owner
T5   a token or a probe of our own that another member had first
     test_token::test_an_own_token_that_another_member_had_first_ends_the_ownership
     test_token::test_a_probe_that_another_member_had_first_is_no_proof
T6   a token that does not come back, or that the server refuses
     test_seat::test_a_token_that_does_not_come_back_in_a_lease_is_a_loss
     test_seat::test_a_token_that_the_server_refuses_is_a_loss_of_its_own_kind
T7   the token of one partition proves nothing about another
     test_flaws::test_a_partition_that_is_renewed_does_not_speak_for_another
T8   certainty counts from the sending of a token, not from its return
     test_token::test_certainty_counts_from_the_moment_a_token_was_sent
T9   members that are killed during takeovers leave many messages
     test_seat::test_many_leftovers_do_not_stop_a_takeover
     test_token::test_many_leftovers_are_acknowledged_but_never_the_newest_token
     test_token::test_a_kill_after_any_step_loses_nothing
     test_seat::test_a_killed_chain_of_members_loses_no_token
T10  what a former owner still writes into the aside
     test_aside_log::TestOwner::test_the_next_owner_reads_everything_and_the_former_has_lost_it
     test_aside_suite::TestRabbitMQAside::test_a_former_owner_cannot_change_records
T11  two members create a group at once
     test_membership::test_two_members_that_create_a_group_at_once_start_it_once
     test_token::test_of_two_first_tokens_the_one_that_starts_earlier_counts
     test_membership::test_a_group_whose_first_token_is_gone_starts_where_it_should
T12  the server does not say where a stream ends
     test_stream_reader::test_the_end_is_behind_everything_that_was_confirmed
     test_stream_reader::test_the_end_beside_writers_is_never_too_low
T13  the token is deleted, and perhaps an older one is left
     test_membership::test_a_token_queue_that_is_deleted_while_it_is_consumed_costs_repeats_and_no_event
     test_membership::test_a_token_that_is_gone_when_a_member_starts_is_replaced_by_the_last_note
     test_membership::test_an_older_token_does_not_count_if_an_owner_has_noted_a_higher_fence
T14  the server cancels a consumer
     test_seat::test_a_deleted_queue_is_a_loss
     test_work_routes::test_a_deleted_queue_is_a_trouble_until_it_is_consumed_again
     test_stream_reader::test_a_follower_gets_what_comes_and_ends_with_the_stream
T15  an owner without progress must renew its token
     test_suite_owners::TestRabbitMQOwners::test_an_owner_that_does_not_receive_for_a_lease_keeps_its_partitions
T16  an owner that was suspended goes on
     test_suite_owners::TestRabbitMQOwners::test_a_suspended_owner_that_resumes_changes_nothing
     test_suite_owners::TestRabbitMQOwners::test_sure_until_of_a_suspended_owner_that_resumes_is_in_the_past
T17  a stream leaves an offset out at each segment
     test_flaws::test_a_group_reads_over_the_offsets_that_segments_leave_out
     test_stream_reader::test_the_end_over_many_segments_is_right
T18  retention removes events that were not read
     test_flaws::test_events_that_were_removed_before_they_were_read_are_reported_and_the_others_are_handled
T19  a start at a time gets a whole chunk of older events too
     test_log_reader::test_a_start_is_an_offset_with_the_event_before_it
     test_suite::TestRabbitMQ::test_a_group_may_start_at_a_time
T20  after its restart a node says for some seconds that a stream is not there
     test_flaws::test_a_stream_whose_node_is_down_is_not_missing
     test_outages::test_a_node_that_is_killed_under_load_loses_nothing
T21  a prefetch counts messages, whatever their size
     test_log_reader::test_the_prefetch_depends_on_the_size_of_the_events
     test_log_reader::test_large_and_small_events_arrive_once_and_in_order
     test_work_queue::test_large_messages_make_the_prefetch_small_at_once
T22  one bound work queue hides a missing stream
     test_publishing::TestOnAServer::test_a_deleted_stream_is_noticed_at_once
     test_publishing::TestSending::test_if_only_one_message_of_an_event_is_refused_the_event_is_unknown
     test_outages::test_a_stream_that_is_deleted_refuses_its_events_and_is_named
T23  the server ends connections that use a stream while it is created or deleted
     test_interrupted::test_members_go_on_all_the_same
     test_interrupted::test_a_new_group_is_created_all_the_same
     test_interrupted::test_groups_are_listed_while_others_create_and_drop_them
T24  a channel or a connection ends while messages are open
     test_publishing::TestSending::test_with_the_connection_all_answers_are_lost
     test_publishing::TestOnAServer::test_a_channel_that_is_closed_in_the_middle_costs_only_the_event_that_closed_it
     test_publishing::TestOnAServer::test_a_cut_connection_loses_and_doubles_nothing
T25  two open messages with the same id, and one of them is returned
     test_amqp_frames::test_a_return_is_that_of_the_oldest_message_it_fits
     test_amqp_frames::test_each_number_gets_one_answer
T26  nothing may be stored behind a refused event of its key
     test_publishing::TestSending::test_behind_a_returned_event_its_key_is_not_accepted
     test_suite::TestRabbitMQ::test_no_event_is_accepted_after_a_refused_one_of_its_key
T27  an event that is too large for the server
     test_publishing::TestOnAServer::test_a_large_event_arrives_and_a_larger_one_is_refused
     test_publishing::TestSending::test_an_event_that_is_too_large_for_the_server_is_found_by_its_size
T28  a memory alarm blocks every connection that publishes
     test_outages::test_under_a_memory_alarm_an_application_waits_and_says_so
     test_publishing::TestOnAServer::test_an_alarm_is_named_and_events_are_accepted_when_it_ends
     test_work_faults::test_under_a_memory_alarm_events_are_handled_and_retries_wait
     test_work_faults::test_under_a_memory_alarm_a_dead_letter_waits_and_other_events_do_not
T29  a server that is silent, and a heartbeat that is longer than the lease
     test_amqp_server::test_a_silent_server_is_given_up_after_two_heartbeats
     test_outages::test_a_node_that_stops_for_a_while_is_noticed_and_nothing_is_lost
     test_checkup::test_a_heartbeat_that_is_longer_than_the_lease_is_reported
T30  a stream is not written to disk before it is confirmed
     test_durability::test_one_node_loses_the_last_moments_in_a_power_cut
T31  an acknowledgement of several messages covers one that is not done
     test_work_queue::test_exactly_what_is_done_is_acknowledged
     test_work_queue::test_open_messages_come_back_and_no_others
T32  the server's count of returns also counts lost connections
     test_work_app::test_cut_connections_charge_nothing
     test_foreign_queues::test_a_crash_of_the_connection_loses_and_charges_nothing
T33  an event that kills its process returns other events too
     test_work_app::test_an_event_that_kills_its_process_becomes_a_dead_letter_and_no_other_event_does
T34  a rung whose queue is gone keeps its messages for minutes
     test_flaws::test_a_dropped_group_loses_its_rungs_before_its_queue
T35  a node that is killed forgets a queue that is a second old
     test_work_queue::test_a_new_rung_is_not_trusted_at_once
     test_work_faults::test_a_killed_node_loses_no_event_and_no_retry
T36  a message that waits at the head of a queue stops the others
     test_flaws::test_a_short_retry_does_not_wait_behind_a_long_one
T37  x-death is no count of attempts, and a message that is sent again must not have it
     test_work_queue::test_a_message_is_sent_again_with_all_that_belongs_to_it
     test_rungs::test_headers_carry_the_state
T38  two members have records at the same position
     test_flaws::test_two_members_keep_their_dead_letters_apart
     test_work_app::test_members_share_events_and_count_the_attempts_of_each_together
T39  several members replay, or the one that replays dies
     test_failure_suite::TestRabbitMQWorkFailure::test_concurrent_replays_run_no_event_twice
     test_failure_suite::TestRabbitMQWorkFailure::test_a_worker_killed_during_a_replay_loses_no_event
T40  a retry in a rung would break the order of its key
     test_failure_suite::TestRabbitMQFailure::test_an_event_that_succeeds_after_retries_keeps_its_place_in_the_order
     test_failure_suite::TestRabbitMQFailure::test_a_key_with_a_long_retry_is_parked_and_drains_in_order
T41  a consumer that is replaced returns messages
     test_work_queue::test_a_growing_prefetch_returns_no_message
     test_work_queue::test_consumers_are_replaced_without_losing_or_repeating_a_message
T42  an aside that is rewritten while others write
     test_generations::TestInterleavings::test_no_record_no_move_and_no_removal_is_lost
     test_generations::TestRewriting::test_a_rewriting_that_is_killed_is_completed_by_the_next_owner
T43  another program's exchange has its own routing keys
     test_publishing::TestOnAServer::test_an_exchange_of_the_application_gets_events_by_their_type
     test_topology_cli::test_a_published_event_of_an_exchange_reaches_its_handler
T44  a server without streams, or with known defects
     test_bad_input::test_a_server_without_streams_is_named_at_once_with_the_cure
     test_checkup::test_versions_with_known_problems_are_named
T45  kill -9 of members and of the node, in both kinds of group
     test_storm::test_members_that_are_killed_lose_and_invert_nothing
     test_storm::test_a_node_that_is_killed_loses_and_inverts_nothing
T46  a node without a replica of a stream refuses to read it
     test_cluster::test_a_node_without_a_replica_is_left_for_the_next_host
T47  a copy that lags behind looks like a log that lost its end
     test_cluster::test_a_copy_that_lags_behind_is_not_taken_for_a_log_that_lost_its_end
T48  the server forgets a quorum queue that is young when it is killed
     test_outages::test_a_token_queue_that_the_server_forgets_is_named_and_created_again
T49  the server stops sending to a reader without a word
     test_log_reader::test_a_reader_to_which_the_server_sends_nothing_more_asks_again
T50  a message that cannot be decoded, or encoded again
     test_hostile_messages::test_a_hostile_message_is_retried_becomes_a_dead_letter_and_is_replayed
     test_hostile_messages::test_a_hostile_message_that_was_returned_stops_no_member
T51  what members use to find each other is deleted
     test_presence::test_members_join_again_when_something_of_theirs_is_deleted
"""

from tests.brokers.trap_tables import named_tests


def test_the_table_has_every_flaw_rule_and_trap_with_tests_that_exist() -> None:
    named = named_tests(__doc__ or "", "tests.brokers.rabbitmq")
    assert named == {"F": list(range(1, 26)), "R": list(range(1, 5)), "T": list(range(1, 52))}
