"""The aside of one place on a real server: owners, former owners, operators, and foreign messages."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from onward.brokers.base import State, Tries
from onward.brokers.core.folded_aside import AppliedMove, MoveRequest
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.aside.aside_entries import AsideEntry, AsidePlace, batches, decoded, encoded, record_entry
from onward.brokers.rabbitmq.aside.aside_log import AsideLost
from onward.brokers.rabbitmq.aside.aside_reader import AsideMissing
from onward.errors import BrokerError
from tests.brokers.rabbitmq.aside_stage import PLACE, all_records, staged
from tests.brokers.rabbitmq.aside_world import record
from tests.brokers.rabbitmq.harness import RabbitHarness
from tests.brokers.rabbitmq.stage import played, until
from tests.servers.rabbitmq import RabbitMQServer


class TestCodec:
    def test_a_batch_survives_the_wire(self) -> None:
        entries = [AsideEntry("a", b"\xff\x00", 7), AsideEntry("b", None, 7), AsideEntry("c", b"", 0, copied=True)]
        batch = decoded(encoded("writer", 3, entries))
        assert (batch.writer, batch.number, list(batch.entries)) == ("writer", 3, entries)

    @pytest.mark.parametrize("body", [b"", b"junk", b"\xff\xfe", b"\x94\x02\xa1w\x01\x90", b"\x93\x01\xa1w\x01"])
    def test_a_message_that_is_not_ours_is_recognised(self, body: bytes) -> None:
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
            decoded(body)

    def test_small_entries_share_a_message_and_keep_their_order(self) -> None:
        entries = [AsideEntry(str(n), b"x" * (n * 100)) for n in range(300)]
        found = list(batches(entries))
        assert [entry for batch in found for entry in batch] == entries
        assert len(found) < 150
        assert max(len(encoded("w" * 32, 1, batch)) for batch in found if len(batch) > 1) <= 65_536 + 100


class TestOwner:
    @played
    async def test_records_are_stored_and_removed(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            assert owner.is_new
            assert await owner.store([record(n) for n in range(5)], 1) is None
            await owner.remove([record(1).id, "unknown"], 1)
            expected = [record(n) for n in (0, 2, 3, 4)]
            assert await all_records(owner) == expected, "its own writes are not in its table"
            assert await all_records(await stage.operator()) == expected

    @played
    async def test_the_next_owner_reads_everything_and_the_former_has_lost_it(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            old = await stage.owner(1)
            await old.store([record(1)], 1)
            await old.witness(b"progress", 1)
            new = await stage.owner(2)
            assert not new.is_new
            assert (new.witnessed, new.fence_seen) == ((1, b"progress"), 2)
            for late in (old.store([record(2)], 1), old.remove([record(1).id], 1), old.witness(b"late", 1)):
                with pytest.raises(AsideLost):
                    await late
            assert await all_records(new) == [record(1)]
            assert await all_records(await stage.operator()) == [record(1)]
            with pytest.raises(AsideLost):
                await stage.owner(1)

    @played
    async def test_an_aside_that_was_never_claimed_is_missing(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            with pytest.raises(AsideMissing, match="aside"):
                await stage.operator()

    @played
    async def test_a_later_owner_reports_that_the_stream_was_deleted(
        self, rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            await stage.owner(1)
            assert not caplog.text
            await stage.owner(7, place=AsidePlace("orders", "g", 3))
            assert "the aside of orders/3 in group g was deleted" in caplog.text

    @played
    async def test_a_stream_whose_founder_was_interrupted_is_opened(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            channel = await stage.connection.channel()
            await channel.declare_queue(names.aside_stream(*PLACE, 0), arguments=names.LOG_ARGUMENTS)
            owner = await stage.owner(1)
            await owner.store([record(1)], 1)
            assert await all_records(await stage.operator()) == [record(1)]

    @played
    async def test_records_of_a_former_log_become_dead_letters(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            await owner.store([record(1, State.WAITING), record(2)], 1)
            assert await owner.bury("log", 1) == 0
            assert await owner.bury("another", 1) == 1
            assert [(each.state, each.position) for each in await all_records(owner)] == [
                (State.DEAD, 1),
                (State.DEAD, 2),
            ]
            assert (await stage.operator()).log_id == "another"

    @played
    async def test_a_refused_record_undoes_the_others_of_its_call(self, rabbitmq_server: RabbitMQServer) -> None:
        """One record is new and is removed again. One replaced an older record, which is restored."""
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1, room=1)
            older = record(1, State.WAITING)
            await owner.store([older], 1)
            large = record(3, value=b"x" * 200_000)
            with RabbitHarness(rabbitmq_server, "/", Path()).refuse_aside(larger_than=100_000):
                assert "NO_ROUTE" in (await owner.store([record(1), record(2), large], 1) or "")
            assert await all_records(await stage.operator()) == [older]
            assert await owner.store([record(2), large], 1) is None
            assert await all_records(owner) == [older, record(2), large]

    @played
    async def test_a_record_that_the_server_finds_too_large_is_refused(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            rabbitmq_server.ctl("eval", "application:set_env(rabbit, max_message_size, 300000).")
            try:
                owner = await stage.owner(1)
                why = await owner.store([record(1), record(2, value=b"x" * 400_000)], 1)
                assert why is not None
                assert "larger than" in why
                assert await owner.store([record(1)], 1) is None
                assert await all_records(owner) == [record(1)]
            finally:
                rabbitmq_server.ctl("eval", "application:set_env(rabbit, max_message_size, 134217728).")

    @played
    async def test_a_lost_connection_is_an_error_and_not_a_hang(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            await stage.connection.close()
            await until(lambda: owner.is_closed)
            with pytest.raises(BrokerError):
                await owner.store([record(1)], 1)


class TestMoves:
    @played
    async def test_an_operator_knows_how_many_it_moved_and_the_owner_learns_it(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = stage.aside()
            moves: list[AppliedMove] = []
            owner.on_moves = moves.extend
            await owner.claim(1)
            await owner.store([record(n) for n in range(4)], 1)
            operator = await stage.operator()
            ids = [record(n).id for n in range(4)]
            request = MoveRequest([*ids[:2], ids[0], "unknown"], State.DEAD, State.WAITING, 7.0)
            assert await operator.request("a", request) == 2
            assert await operator.request("a", request) == 2, "the same request again counts once"
            assert await operator.request("b", request) == 0
            assert await operator.request("c", MoveRequest(ids, State.DEAD, None, None)) == 2
            await until(lambda: len(moves) == 2)
            assert [(list(each.ids), each.to, each.due) for each in moves] == [
                (ids[:2], State.WAITING, 7.0),
                (ids[2:], None, None),
            ]
            moved = msgspec.structs.replace(record(0), state=State.WAITING, due=7.0, tries=Tries())
            assert (await all_records(owner))[0] == moved

    @played
    async def test_a_move_before_the_claim_is_not_reported(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            first = await stage.owner(1)
            await first.store([record(1)], 1)
            request = MoveRequest([record(1).id], State.DEAD, State.WAITING, 7.0)
            assert await first.request("a", request) == 1
            moves: list[AppliedMove] = []
            second = stage.aside()
            second.on_moves = moves.extend
            table = await second.claim(2)
            assert table.rows[record(1).id].state is State.WAITING
            assert not moves

    @played
    async def test_many_operators_move_each_record_once(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            await owner.store([record(n) for n in range(40)], 1)
            operators = [await stage.operator() for _ in range(4)]
            requests = [MoveRequest([record(n).id], State.DEAD, State.WAITING, 1.0) for n in range(40)]
            moved = await asyncio.gather(
                *(each.request(f"{at}-{n}", one) for at, each in enumerate(operators) for n, one in enumerate(requests))
            )
            assert sum(moved) == 40


class TestWork:
    PLACE = AsidePlace("orders", "g", "work")

    @played
    async def test_members_store_dead_letters_beside_each_other_and_keep_none_in_memory(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            members = [stage.aside(place=self.PLACE, keeps_rows=False) for _ in range(3)]
            assert await members[2].store([record(2)]) is None
            stored = await asyncio.gather(*(each.store([record(n)]) for n, each in enumerate(members)))
            assert stored == [None] * 3
            assert not any(each.table.rows for each in members)
            mover = stage.aside(place=self.PLACE)
            table = await mover.claim(0)
            assert {row.position for row in table.rows.values()} == {0, 1, 2}
            assert await members[0].store([record(3)]) is None, "the mover has fenced a member"
            await mover.catch_up()
            assert len(mover.table.rows) == 4

    @played
    async def test_a_replay_reaches_the_mover(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            await stage.aside(place=self.PLACE, keeps_rows=False).store([record(1), record(2)])
            operator, mover = await stage.operator(place=self.PLACE), stage.aside(place=self.PLACE)
            moves: list[AppliedMove] = []
            mover.on_moves = moves.extend
            request = MoveRequest([record(1).id], State.DEAD, State.WAITING, 7.0)
            assert await operator.request("a", request) == 1
            table = await mover.claim(0)
            waiting = [row for row in table.rows.values() if row.state is State.WAITING]
            (asked,) = await mover.records(waiting)
            assert (asked.id, asked.tries, asked.due) == (record(1).id, Tries(), 7.0)
            await mover.remove([asked.id])
            later = MoveRequest([record(2).id], State.DEAD, State.WAITING, 8.0)
            assert await operator.request("b", later) == 1
            await until(lambda: moves)
            assert [list(each.ids) for each in moves] == [[record(2).id]]
            await operator.catch_up()
            assert list(operator.table.rows) == [record(2).id]


class TestForeign:
    @played
    async def test_foreign_messages_are_skipped_with_one_warning_each(
        self, rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            await owner.store([record(1)], 1)
            good = record_entry(record(2), 1)
            junk = [b"", b"junk", b"\xff\xfe", encoded("w", 1, [AsideEntry(record(1).id, b"junk", 1), good])]
            await stage.publish(0, junk)
            await owner.store([record(3)], 1)
            assert await all_records(owner) == [record(n) for n in (1, 2, 3)]
            warned = [each.getMessage() for each in caplog.records if "is skipped" in each.getMessage()]
            assert len(warned) == 4
            assert all(names.aside_stream(*PLACE, 0) in each for each in warned)


class TestBodies:
    @played
    async def test_bodies_beyond_the_room_are_read_again_by_offset(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1, room=1)
            records = [record(n, State.HELD, value=bytes([n]) * 5_000) for n in range(120)]
            for at in range(0, 120, 7):
                await owner.store(records[at : at + 7], 1)
            assert all(row.body is None for row in owner.table.rows.values())
            assert await all_records(owner) == records
            rows = list(owner.table.above(-1))
            assert await owner.records([rows[3], rows[111]]) == [records[3], records[111]], "far apart"

    @played
    async def test_a_record_without_its_body_in_memory_can_be_moved_and_replaced(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1, room=1)
            await owner.store([record(n) for n in range(4)], 1)
            rows = list(owner.table.above(-1))
            request = MoveRequest([record(1).id], State.DEAD, State.WAITING, 7.0)
            assert await owner.request("a", request) == 1
            await owner.store([record(3, State.HELD, value=b"new")], 1)
            await owner.remove([record(2).id], 1)
            found = await all_records(owner)
            assert [(each.position, each.state, each.due) for each in found] == [
                (0, State.DEAD, None),
                (1, State.WAITING, 7.0),
                (3, State.HELD, None),
            ]
            assert found[2].event.value == b"new"
            assert len(await owner.records(rows)) == 4, "the bodies of earlier rows are still in the stream"
