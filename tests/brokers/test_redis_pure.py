"""The pure parts of the Redis broker."""

import random
import re
from pathlib import Path

import pytest
from redis.connection import SSLConnection
from redis.crc import key_slot
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from onward import clock
from onward.brokers.core.publishing import Outgoing, Refusal, Window
from onward.brokers.redis import permissions
from onward.brokers.redis.address import RedisAddress
from onward.brokers.redis.aside_rows import id_at, is_id, place_of
from onward.brokers.redis.courier import Packed, WindowState
from onward.brokers.redis.group_watch import UNKNOWN, GroupWatch, LeaseView, ListedMember
from onward.brokers.redis.keys import PartitionKeys, TopicKeys, type_of
from onward.brokers.redis.permissions import TRIALS
from onward.brokers.redis.positions import hex_of, id_of, joined, position_of
from onward.brokers.redis.scripts import HEX
from onward.brokers.redis.server_errors import code_of, explained, is_passing
from onward.brokers.redis.server_facts import ServerFacts, is_weaker
from onward.brokers.redis.turn_schedule import Step, TurnSchedule
from onward.errors import BadSetting, RelayFenced
from onward.event import Partition
from onward.settings import ClientSettings, Settings
from onward.testing.scenario import event
from tests.servers.redis import RedisServer

HERE = Partition("orders", 3)


class TestPositions:
    def test_an_id_and_its_position_are_one(self) -> None:
        for ms, seq in [(0, 0), (0, 1), (1_794_859_514_557, 7), ((1 << 42) - 1, (1 << 21) - 1)]:
            position = position_of(f"{ms}-{seq}".encode())
            assert position is not None
            assert id_of(position) == f"{ms}-{seq}"
            assert len(hex_of(position)) == 16

    @pytest.mark.parametrize("id_", [b"4398046511104-0", b"0-2097152", b"18446744073709551615-18446744073709551615"])
    def test_an_id_that_does_not_fit_has_none(self, id_: bytes) -> None:
        assert position_of(id_) is None

    def test_order_is_the_order_of_the_hex_digits(self) -> None:
        rng = random.Random(7)
        positions = sorted(
            {joined(rng.getrandbits(42), rng.getrandbits(21)) or 0 for _ in range(300)} | {1 << 53, (1 << 53) + 1}
        )
        assert sorted(map(hex_of, positions)) == [hex_of(each) for each in positions]

    def test_lua_converts_as_python_does(self, redis_server: RedisServer) -> None:
        """Beyond 2^53 a Lua number cannot tell neighbours apart."""
        rng = random.Random(8)
        edges = [0, 1, (1 << 20) - 1, 1 << 20, (1 << 21) - 1]
        pairs = [(rng.getrandbits(42), rng.getrandbits(21)) for _ in range(300)] + [
            ((1 << 42) - 1, seq) for seq in edges
        ]
        with redis_server.client() as client:
            for ms, seq in pairs:
                script = HEX + "local h = hex(ARGV[1]); return {h, id(h)}"
                digits, back = client.eval(script, 0, f"{ms}-{seq}")
                assert digits.decode() == hex_of(ms << 21 | seq)
                assert back.decode() == f"{ms}-{seq}"


class TestKeys:
    def test_the_keys_of_a_partition_share_its_tag(self) -> None:
        keys = PartitionKeys.own(Partition("orders", 3))
        names = [keys.stream, keys.meta, keys.marks, keys.groups, keys.relays, keys.producer("p"), keys.moves("g")]
        slots = {key_slot(name.encode()) for name in (*names, *keys.aside("g"), keys.group("g"))}
        assert slots == {key_slot(b"orders:3")}
        topic = TopicKeys("orders")
        assert key_slot(topic.members("g").encode()) == key_slot(topic.news("g").encode()) == key_slot(b"orders")
        assert key_slot(b"orders:4") not in slots, "partitions spread over a cluster"

    def test_each_has_a_type(self) -> None:
        keys, topic = PartitionKeys.own(Partition("orders", 3)), TopicKeys("orders")
        assert type_of(keys.stream) == type_of(topic.news("g")) == "stream"
        assert type_of(topic.topic) == type_of(keys.meta) == type_of(keys.group("g")) == "hash"
        assert (type_of(keys.groups), type_of(keys.moves("g")), type_of(keys.marks)) == ("set", "list", "zset")
        assert [type_of(key) for key in keys.aside("g")] == ["hash", "hash", "zset"]
        assert (type_of("onward:topics"), type_of("onward:relays")) == ("set", "hash")

    def test_a_record_has_one_place(self) -> None:
        id_ = "a:group:0123abcd:3:1794859514557"
        assert is_id(id_)
        assert id_at("a:group", HERE, place_of(id_)) == id_
        for odd in ("", "x", "a:b:c", "g:log:x:1", "g:log:1:x", "g:log:1:-1", f"g:log:1:{1 << 64}"):
            assert not is_id(odd), odd


FACTS = {"run_id": "r" * 40, "master_replid": "p" * 40, "redis_version": "7.0.15", "role": "master"}


def facts(config: str = "", **changes: str) -> ServerFacts:
    lines = "\r\n".join(f"{name}:{value}" for name, value in (FACTS | {"aof_enabled": "1"} | changes).items())
    return ServerFacts.of([f"# Server\r\n{lines}\r\n".encode()], {"appendfsync": config} if config else {})


class TestServerFacts:
    def test_a_good_server(self) -> None:
        good = facts("always")
        assert good.obstacle() == ""
        assert (good.incarnation, good.durability) == ("r" * 12 + "p" * 12, "fsync")
        assert [finding.level for finding in good.findings()] == ["ok", "ok"]

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"redis_version": "6.0.16"}, "6.2 or newer"),
            ({"redis_version": "5.0"}, "6.2 or newer"),
            ({"role": "slave"}, "connect to its master"),
            ({"run_id": ""}, "not to a proxy"),
            ({"master_replid": ""}, "not to a proxy"),
        ],
    )
    def test_one_that_cannot_be_used(self, changes: dict[str, str], says: str) -> None:
        assert says in facts(**changes).obstacle()

    def test_versions_are_numbers(self) -> None:
        for version in ("6.2.0", "6.2.11", "7.4", "8.0.2", "10.1.0", "255.255.255"):
            assert facts(redis_version=version).obstacle() == ""

    def test_a_policy_without_a_limit_evicts_nothing(self) -> None:
        assert facts(maxmemory_policy="allkeys-lru", maxmemory="0").risk() == ""
        evicting = facts(maxmemory_policy="volatile-lru", maxmemory="1000")
        assert "set maxmemory-policy noeviction" in evicting.risk()
        assert evicting.obstacle() == ""

    def test_a_restart_and_a_failover_change_the_incarnation(self) -> None:
        before = facts().incarnation
        assert facts(run_id="q" * 40).incarnation != before
        assert facts(master_replid="q" * 40).incarnation != before

    def test_durability(self) -> None:
        assert facts("everysec").durability == facts("no").durability == facts().durability == "window"
        assert facts("always", aof_enabled="0").durability == "memory"
        assert is_weaker("window", "fsync")
        assert not is_weaker("fsync", "window")
        assert not is_weaker("memory", None)

    @pytest.mark.parametrize(("fails_over", "replicas"), [(True, {}), (False, {"slave0": "state=online"})])
    def test_where_a_replica_may_take_over_only_replication_helps(
        self, fails_over: bool, replicas: dict[str, str]
    ) -> None:
        promised = facts("always", **replicas).promising(1, fails_over=fails_over)
        assert [each.cure for each in promised.findings()][1] == "set replication=2 where no event may be lost"
        alone = facts("everysec").promising(1, fails_over=False)
        assert [each.cure for each in alone.findings()][1] == "set appendfsync always where no event may be lost"


def all_scripts() -> list[str]:
    folder = Path(permissions.__file__).parent
    return [path.read_text() for path in folder.glob("*scripts.py")]


class TestErrors:
    def test_those_that_pass(self) -> None:
        for text in ("LOADING Redis is loading", "BUSY Redis is busy", "TRYAGAIN Multiple keys", "MISCONF Errors"):
            assert is_passing(ResponseError(text)), text
        assert is_passing(ReadOnlyError("You can't write against a read only replica."))
        for text in ("WRONGTYPE Operation", "OOM command", "ERR unknown command"):
            assert not is_passing(ResponseError(text)), text

    def test_codes_that_redis_py_cuts_off(self) -> None:
        assert code_of(OutOfMemoryError("command not allowed")) == "OOM"
        assert code_of(ResponseError("something else")) == ""

    def test_codes_that_an_old_server_puts_into_the_error_of_a_script(self) -> None:
        where = "Error running script (call to f_b35c2d): @user_script:30: @user_script: 30:"
        replica = ResponseError(f"{where} -READONLY You can't write against a read only replica.")
        assert code_of(replica) == "READONLY"
        assert is_passing(replica)
        assert code_of(ResponseError(f"{where} -OOM command not allowed when used memory > 'maxmemory'.")) == "OOM"

    @pytest.mark.parametrize(
        "error",
        [
            OutOfMemoryError(f"command not allowed, no memory. script: {'0a' * 20}, on @user_script:12."),
            ResponseError(
                "Error running script (call to f_b3): @user_script:3: @user_script: 3: -OOM command not allowed"
            ),
        ],
    )
    def test_the_place_in_our_script_is_not_shown(self, error: ResponseError) -> None:
        text = explained(error)
        assert "raise maxmemory" in text
        assert "command not allowed" in text
        assert "script" not in text

    def test_every_command_of_a_script_is_asked_for_at_start(self) -> None:
        used = {name for text in all_scripts() for name in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}
        assert len(used) > 20
        assert used <= {name for name, *_ in TRIALS}

    def test_a_permission_names_its_command(self) -> None:
        text = explained(ResponseError("NOPERM this user has no permissions to run the 'client|unblock' command"))
        assert "the command CLIENT|UNBLOCK" in text
        assert "ACL SETUSER" in text
        assert "one of Onward's keys" in explained(ResponseError("NOPERM No permissions to access a key"))


def view(owner: str = "", beat: str = "1", **changes: object) -> LeaseView:
    return LeaseView("inc", owner, beat, 10.0, False, 5, "", "log", "log", True)._replace(**changes)  # type: ignore[arg-type]


class TestGroupWatch:
    """Whose lease counts, by our own clock."""

    def test_a_silent_owner_is_over_after_its_own_lease(self) -> None:
        watch = GroupWatch("me", 1.0)
        assert watch.seat(HERE, view("5:other"), "inc", 100.0).owner == "other"
        assert 110.0 < watch.next_expiry < 111.0, "its lease, not ours"
        assert watch.seat(HERE, view("5:other"), "inc", 110.0).owner == "other"
        assert watch.seat(HERE, view("5:other"), "inc", 110.6).owner is None

    def test_a_beat_is_a_sign_of_life_also_when_it_goes_back(self) -> None:
        watch = GroupWatch("me", 1.0)
        watch.seat(HERE, view("5:other", "7"), "inc", 100.0)
        assert watch.seat(HERE, view("5:other", "6"), "inc", 111.0).owner == "other"

    def test_an_unknown_owner_is_waited_for_as_long_as_our_own_lease_at_least(self) -> None:
        watch = GroupWatch("me", 20.0)
        lost = view(UNKNOWN, lease_s=0.0)
        assert watch.seat(HERE, lost, "inc", 100.0).owner == UNKNOWN
        assert watch.seat(HERE, lost, "inc", 119.0).owner == UNKNOWN
        assert watch.seat(HERE, lost, "inc", 122.0).owner is None

    def test_a_token_of_ours_counts_only_while_the_server_is_the_one_that_confirmed_it(self) -> None:
        watch = GroupWatch("me", 10.0)
        watch.confirmed(HERE, "5:me", "inc")
        assert watch.seat(HERE, view("5:me"), "inc", 100.0).owner == "me"
        restarted = view("5:me", incarnation="other")
        assert watch.seat(HERE, restarted, "other", 100.0).owner == UNKNOWN, "a claim of another may be lost"
        assert watch.seat(HERE, restarted, "other", 111.0).owner is None

    def test_two_partitions_on_two_nodes_may_have_the_same_token(self) -> None:
        watch, there = GroupWatch("me", 10.0), Partition("orders", 1)
        watch.confirmed(HERE, "5:me", "inc")
        watch.confirmed(there, "5:me", "other")
        assert watch.seat(HERE, view("5:me"), "inc", 100.0).owner == "me"
        assert watch.seat(there, view("5:me", incarnation="other"), "other", 100.0).owner == "me"
        watch.forget([there])
        assert watch.seat(HERE, view("5:me"), "inc", 100.0).owner == "me"

    def test_the_highest_fence_is_remembered(self) -> None:
        watch = GroupWatch("me", 10.0)
        watch.seat(HERE, view(fence=9), "inc", 100.0)
        watch.seat(HERE, view(fence=7), "inc", 101.0)
        assert watch.highest_fence(HERE) == 9

    def test_gone_counts_for_the_last_ownership_only(self) -> None:
        watch = GroupWatch("me", 10.0)
        assert watch.seat(HERE, view(gone="5"), "inc", 100.0).is_gone
        assert not watch.seat(HERE, view(gone="4"), "inc", 100.0).is_gone
        assert not watch.seat(HERE, view("5:other", gone="5"), "inc", 100.0).is_gone

    def test_members_are_observed_too(self) -> None:
        watch = GroupWatch("me", 10.0)
        listed = {"me": ListedMember("1", 10.0, 0), "other": ListedMember("1", 10.0, 0)}
        assert watch.members("orders", listed, 100.0) == {"me": True, "other": True}
        assert watch.members("orders", listed, 111.0) == {"me": True, "other": False}
        watch.forget((), ["orders other"])
        assert watch.members("orders", listed, 111.0)["other"], "one that comes again is new"


def window(*keys: str | None, relay: tuple[str, int] | None = None, size: int = 10) -> Window[Packed]:
    items = [Outgoing(event("orders", key, n), 3, size, Packed(b"x" * size, relay)) for n, key in enumerate(keys)]
    return Window(items, 0.0)


class TestWindowState:
    def test_calls_are_cut_by_count_and_bytes_and_relay_and_stay_the_same(self) -> None:
        state = WindowState(window(*["a"] * 1_100))
        assert [len(call.items) for call in state.calls(HERE)] == [500, 500, 100]
        rest = state.calls(HERE)[1:]
        state.accept(state.calls(HERE)[0])
        assert state.calls(HERE) == rest, "a number would stand for other events"
        state = WindowState(window(*["a"] * 4, size=400_000))
        assert [len(call.items) for call in state.calls(HERE)] == [2, 2]
        mixed = Window([*window("a", "b").items, *window("c", relay=("s", 1)).items, *window("d").items])
        assert [call.items for call in WindowState(mixed).calls(HERE)] == [(0, 1), (2,), (3,)]

    def test_a_refusal_takes_down_what_is_behind_it_and_nothing_before(self) -> None:
        state = WindowState(window("a", "b", "a", "a", None, "b"))
        state.refuse([2], Refusal("no", kind=RelayFenced))
        assert state.open == {HERE: [0, 1, 4, 5]}
        assert set(state.window.answers) == {2, 3}
        refusal = state.window.answers[2]
        assert refusal is not None
        assert refusal.kind is RelayFenced

    def test_what_was_sent_without_an_answer_is_unknown(self) -> None:
        state = WindowState(window("a", "b"))
        state.doubtful.add(0)
        state.refuse([0, 1], Refusal("no"))
        assert [answer.unknown for answer in state.window.answers.values() if answer] == [True, False]

    def test_events_without_a_key_stop_nothing(self) -> None:
        state = WindowState(window(None, None))
        state.refuse([0], Refusal("no"))
        assert state.open == {HERE: [1]}


class TestTurnSchedule:
    def test_a_turn_that_failed_is_followed_by_a_pause_whatever_is_asked_for(self) -> None:
        schedule = TurnSchedule()
        schedule.kick(0.0)
        assert schedule.wait() is Step.TURN
        for _ in range(6):
            schedule.failed(by=clock.now() + 60.0)
        schedule.kick(0.0)
        begun = clock.now()
        assert schedule.wait() is Step.TURN
        assert clock.now() - begun > 0.4
        schedule.succeeded()
        schedule.kick(0.0)
        begun = clock.now()
        assert schedule.wait() is Step.TURN
        assert clock.now() - begun < 0.4

    def test_a_closed_one_has_no_turn(self) -> None:
        schedule = TurnSchedule()
        schedule.close()
        assert schedule.wait() is Step.END

    def test_a_glance_is_between_turns_and_a_turn_replaces_it(self) -> None:
        schedule = TurnSchedule()
        schedule.kick(clock.now() + 0.2)
        schedule.glance(clock.now() + 0.05)
        assert schedule.wait() is Step.GLANCE
        schedule.glance(clock.now() + 60.0)
        assert schedule.wait() is Step.TURN
        schedule.close()
        assert schedule.wait() is Step.END


class TestAddress:
    """What a URL says."""

    def test_a_cluster_has_several_hosts_and_one_user(self) -> None:
        address = RedisAddress.of("rediss+cluster://app:secret@one:7001,two", Settings())
        assert address.kind == "cluster"
        assert list(address.hosts) == [("one", 7001), ("two", 6379)]
        assert (address.options["username"], address.options["password"]) == ("app", "secret")
        assert "secret" not in address.name
        node = address.at(("three", 7003))
        connection = node.connection(1.0)
        assert (connection.host, connection.port, connection.username) == ("three", 7003, "app")
        assert type(connection) is SSLConnection

    def test_sentinels_have_a_password_of_their_own(self) -> None:
        client = {"sentinel_password": "other", "client_name": "shop"}
        url = "redis+sentinel://:secret@one,two:26400/shop/2"
        address = RedisAddress.of(url, Settings(client=ClientSettings(client)))
        assert list(address.hosts) == [("one", 26379), ("two", 26400)]
        assert (address.kind, address.service, address.options["db"]) == ("sentinel", "shop", 2)
        assert "sentinel_password" not in address.server_options
        assert address.sentinel_options == {"password": "other", "client_name": "shop"}

    @pytest.mark.parametrize(
        "url", ["redis+cluster://one/1", "redis+cluster://one/0", "redis+cluster://one:7001,two/x"]
    )
    def test_a_cluster_has_no_database(self, url: str) -> None:
        with pytest.raises(BadSetting, match="no numbered databases"):
            RedisAddress.of(url, Settings())
