"""Where each scenario of the Redis design (its §13) and each trap of the seeds' streams is tested.
S: a scenario, T: a trap.

S1   test_redis_publishing::test_a_call_whose_answer_is_lost_is_sent_again_and_stored_once
S2   test_redis_publishing::test_a_late_copy_on_an_old_connection_stores_nothing
S3   test_redis_publishing::test_nothing_is_stored_behind_a_refusal_in_a_row_of_calls
S4   test_redis_publishing::test_a_server_that_forgot_the_scripts_is_given_them_again
S5   test_redis_leases::test_a_takeover_that_the_server_lost_does_not_give_the_partition_back_to_the_silent_owner
S6   test_redis_leases::test_a_free_partition_whose_claim_the_server_lost_is_not_given_away_at_once
S7   test_redis_leases::test_a_takeover_that_the_server_lost_does_not_give_the_partition_back_to_the_silent_owner
     test_redis_leases::test_a_fence_grows_though_the_servers_clock_went_back
S8   test_redis_loss::test_a_promoted_replica_that_lagged_gives_no_position_below_a_cursor
     test_redis_loss::test_a_restarted_server_gives_no_position_twice_and_none_below_a_cursor
S9   test_redis_replication::test_publish_returns_when_the_replica_has_the_event
S10  test_redis::TestRedis::test_a_suspended_owner_that_resumes_changes_nothing
     test_redis_leases::test_nothing_of_a_lapsed_lease_is_settled_or_renewed
S11  test_redis_cluster::test_renewals_go_on_while_a_slot_moves_key_by_key
S12  test_redis_reading::test_a_clock_that_went_back_steps_to_the_next_millisecond_in_time
     test_redis_reading::test_an_id_that_does_not_fit_stops_its_partition
S13  test_redis_loss::test_a_new_key_in_the_index_keeps_the_order_of_neighbouring_positions
S14  test_redis_streams::test_another_consumer_in_the_group_stops_the_partition_and_is_named
     test_redis_reclaim::test_a_consumer_that_reads_beside_us_stops_the_partition_until_it_is_idle
S15  test_redis_figures::test_events_trimmed_before_they_were_read_are_counted
     test_redis_streams::test_what_others_trim_before_it_was_read_is_counted_as_lost
S16  test_redis_publishing::test_a_call_whose_answer_is_lost_is_sent_again_and_stored_once
     test_redis_publishing::test_the_client_has_no_retries_of_its_own
S17  test_redis_loss::test_after_flushall_the_topic_is_another_log_and_starts_at_its_beginning
     test_redis_loss::test_a_deleted_key_stops_nothing
     test_redis_leases::test_a_dropped_group_ends_a_member_that_slept
S18  test_redis_reading::test_the_doorbell_rings_for_an_event_between_the_read_and_the_block
T3   test_redis::TestRedis::test_members_of_a_group_share_the_events_without_overlap
     test_redis::TestRedis::test_key_order_holds_while_members_join_and_are_killed
T7   test_redis_loss::test_a_group_that_the_server_lost_is_not_a_dropped_group
     test_redis_publishing::test_idle_producers_take_a_new_name
     test_redis_streams::test_a_group_that_was_destroyed_is_created_again_at_our_progress
T8   test_redis_reading::test_trimming_removes_what_every_group_has_finished_and_nothing_else
     test_redis_streams::test_with_trim_what_every_group_has_finished_goes
     test_redis_reclaim::test_entries_that_were_trimmed_before_they_were_finished_leave_a_stub
T9   test_redis_reclaim::test_entries_that_were_trimmed_before_they_were_finished_leave_a_stub
T10  test_redis_failure::TestRedisFailure::test_an_undecodable_event_is_a_dead_letter_at_once_with_its_raw_value
     test_redis_reading::test_an_entry_that_cannot_be_decoded_stops_its_partition
     test_redis_streams::test_an_entry_that_does_not_fit_is_a_dead_letter_and_stops_nothing
     test_redis_reclaim::test_delivery_counts_become_attempts_so_a_poison_entry_ends_as_a_dead_letter
T11  test_redis_reclaim::test_reclaiming_follows_the_pending_list_to_its_end
T12  test_redis::TestRedis::test_unsettled_events_are_delivered_again_after_a_crash
T13  test_redis_leases::test_members_that_are_gone_are_taken_off_the_list
     test_redis_reclaim::test_orphan_consumers_are_removed_only_when_they_hold_nothing
T14  test_redis_loss::test_a_promoted_replica_that_lagged_gives_no_position_below_a_cursor
     test_redis_clock::test_a_clock_that_is_set_loses_nothing_and_gives_nothing_twice
T18  test_redis_traps::test_handlers_that_stop_finish_what_they_began_and_the_next_owner_repeats_nothing
T19  test_redis_publishing::test_another_partition_count_stops_a_publisher
     test_redis_publishing::test_another_hash_version_is_refused
T20  test_redis_servers::test_durability_is_what_the_server_has
     test_redis_storm::test_a_server_that_loses_its_last_moments_loses_nothing_else
T22  test_redis_pure::TestKeys::test_the_keys_of_a_partition_share_its_tag
"""

from onward import Onward
from tests.brokers.redis_stage import play, staged
from tests.brokers.trap_tables import named_tests, stopped_in_the_middle
from tests.servers.redis import RedisServer


def test_the_table_has_every_scenario_and_trap_with_tests_that_exist() -> None:
    named = named_tests(__doc__ or "", "tests.brokers")
    assert named == {"S": list(range(1, 19)), "T": [3, *range(7, 15), 18, 19, 20, 22]}


def test_handlers_that_stop_finish_what_they_began_and_the_next_owner_repeats_nothing(
    redis_server: RedisServer,
) -> None:
    """Trap 18: a stop cancels no run, and stores the progress of all before it leaves."""

    async def scene() -> None:
        async with staged(redis_server, partitions=2) as stage:
            app = Onward(stage.url, **stage.options)
            started, ended = await stopped_in_the_middle(app, stage.topic, 60, group=stage.group)
            assert sorted(started) == sorted(ended)
            assert len(ended) < 60
            member = await (await stage.member(await stage.broker())).hold(2)
            assert not any(assigned.unclean for assigned in member.assigned.values())
            await member.take(60 - len(ended))
            await member.quiet(0.3)
            assert sorted(member.values + ended) == list(range(60))

    play(scene())
