"""Topology, doctor and metrics on newer versions of RabbitMQ: the same tests as on the oldest one."""

import pytest

from tests.brokers.rabbitmq import test_checkup, test_figures, test_management, test_operations, test_topology_server
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.more, pytest.mark.servers]

place = test_topology_server.place
test_seed = test_topology_server.test_the_whole_seed_is_planned_applied_and_then_there_is_nothing_to_do
test_routes = test_topology_server.test_the_routes_of_the_seed_lead_to_its_queues
test_rejected = test_topology_server.test_a_rejected_message_reaches_the_dead_letter_queue
test_each_argument = test_topology_server.test_each_argument_that_differs_is_named
test_all_arguments = test_topology_server.test_all_arguments_that_differ_are_named_at_once
test_kind = test_topology_server.test_an_exchange_of_another_kind_is_refused
test_passive = test_topology_server.test_without_compare_the_questions_are_passive
test_api = test_management.test_what_the_api_says
test_login = test_management.test_a_wrong_password_and_a_user_without_the_tag_are_named
test_facts = test_checkup.test_the_facts_of_a_real_server
test_alarm = test_checkup.test_an_alarm_of_a_real_server_is_an_error
test_healthy = test_operations.test_a_topology_is_created_known_and_healthy
test_deleted = test_operations.test_a_deleted_queue_and_a_lost_route_are_found
test_depths = test_figures.test_depths_consumers_and_failed_probes_are_seen


@pytest.fixture(params=["newer_rabbitmq_server", "newest_rabbitmq_server"], scope="module")
def rabbitmq_server(request: pytest.FixtureRequest) -> RabbitMQServer:
    server: RabbitMQServer = request.getfixturevalue(request.param)
    return server
