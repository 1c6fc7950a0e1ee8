"""Groups: every group gets every event, and its members share them. Groups and topics can be listed and dropped."""

import asyncio
import time

import pytest

from onward.brokers.base import MemberInfo, TopicSpec, Topology
from onward.errors import BadSetting, BrokerError, PartitionsDiffer
from onward.event import Partition
from onward.testing.scenario import Kit, Member, event, scenario


class GroupScenarios:
    @scenario()
    async def test_every_group_gets_every_event(self, kit: Kit) -> None:
        broker = await kit.broker()
        one, two = await kit.member(broker, "one"), await kit.member(broker, "two")
        await broker.publish(kit.events(60, keys=6))
        await one.take(60)
        await one.settle()
        await two.take(60)
        assert sorted(one.values) == sorted(two.values)

    @scenario()
    async def test_members_of_a_group_share_the_events_without_overlap(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker()
        members = [await kit.member(one), await kit.member(two)]
        while not all(len(member.assigned) == 2 for member in members):
            await asyncio.gather(*(member.receive() for member in members))
        await one.publish(kit.events(200, keys=40))
        while sum(len(member.deliveries) for member in members) < 200:
            await asyncio.gather(*(member.receive() for member in members))
        ids = [delivery.event.id for member in members for delivery in member.deliveries]
        assert len(ids) == len(set(ids)) == 200
        assert all(member.deliveries for member in members)

    @scenario()
    async def test_start_counts_only_while_the_group_has_no_progress(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish([event(kit.topic, "a", n) for n in range(3)])
        assert {"earliest", "latest"} <= broker.features.starts
        member = await (await kit.member(broker, "late", start="latest")).hold(4)
        await broker.publish([event(kit.topic, "a", n) for n in range(3, 6)])
        await member.take(3)
        assert member.values == [3, 4, 5]
        await member.settle(member.deliveries[:1])
        await member.subscription.close()
        again = await kit.member(broker, "late", start="latest")
        await again.take(2)
        assert again.values == [4, 5], "start moved a group that has progress"

    @scenario()
    async def test_a_group_may_start_at_a_time(self, kit: Kit) -> None:
        broker = await kit.broker()
        if "time" not in broker.features.starts:
            pytest.skip("this broker cannot start at a time")
        old, new = time.time() - 3600, time.time()
        await broker.publish([event(kit.topic, "a", n, time=old) for n in range(3)])
        await asyncio.sleep(0.05)
        between = time.time()
        await asyncio.sleep(0.05)
        await broker.publish([event(kit.topic, "a", n, time=new) for n in range(3, 6)])
        member = await kit.member(broker, start=between)
        await member.until(lambda: 5 in member.values)
        assert member.values[-3:] == [3, 4, 5]
        assert 0 not in member.values

    @scenario()
    async def test_groups_are_listed_and_dropped(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(5))
        assert not list(await broker.groups(kit.topic))
        member = await kit.member(broker, "billing")
        await member.take(5)
        await member.settle()
        (info,) = await broker.groups(kit.topic)
        assert (info.group, info.topic, len(info.members)) == ("billing", kit.topic, 1)
        settled = {delivery.partition.index: delivery.position + 1 for delivery in member.deliveries}
        for index, watermark in settled.items():
            standing = info.partitions[index]
            assert standing.watermark == watermark
            assert standing.end is None or standing.end >= watermark
            assert standing.owner == info.members[0].name
            assert standing.fence == member.assigned[Partition(kit.topic, index)].fence
        with pytest.raises(BrokerError):
            await broker.drop_group(kit.topic, "billing")
        await member.subscription.close()
        (info,) = await broker.groups(kit.topic)
        assert not list(info.members)
        assert not any(standing.owner for standing in info.partitions.values())
        await broker.drop_group(kit.topic, "billing")
        assert not list(await broker.groups(kit.topic))
        again = await kit.member(broker, "billing")
        await again.take(5)

    @scenario()
    async def test_a_member_is_listed_with_its_endpoint_and_ordering(self, kit: Kit) -> None:
        broker = await kit.broker()
        listed = MemberInfo("web-1", "127.0.0.1:9464", "partition")
        subscription = await broker.subscribe(
            [kit.topic], group="billing", member=str(listed), ordering="partition", start="earliest"
        )
        member = await Member(subscription, yields=True).hold(4)
        (info,) = await broker.groups(kit.topic)
        assert list(info.members) == [listed]
        assert list(await broker.owners(kit.topic, "billing")) == [listed]
        assert not list(await broker.owners(kit.topic, "other"))
        assert {standing.owner for standing in info.partitions.values()} == {"web-1"}
        await member.subscription.close()
        assert not list(await broker.owners(kit.topic, "billing"))

    @scenario()
    async def test_topics_are_listed_and_dropped(self, kit: Kit) -> None:
        broker = await kit.broker()
        assert kit.topic not in {spec.name for spec in await broker.topics()}
        await broker.drop_topic(kit.topic)  # no error, although there is no such topic
        await broker.publish(kit.events(20, keys=10))
        assert TopicSpec(kit.topic, 4) in await broker.topics()
        member = await (await kit.member(broker, "billing")).hold(4)
        await member.take(20)
        await member.settle()
        with pytest.raises(BrokerError, match="billing"):
            await broker.drop_topic(kit.topic)
        await member.subscription.close()
        before = {partition: assigned.log_id for partition, assigned in member.assigned.items()}
        await broker.drop_topic(kit.topic)
        assert kit.topic not in {spec.name for spec in await broker.topics()}
        assert not list(await broker.groups(kit.topic))
        await broker.publish([event(kit.topic, "a", 7)])
        again = await (await kit.member(broker, "billing")).hold(4)
        await again.take(1)
        assert again.values == [7], "the new topic has events or progress of the dropped one"
        assert all(again.assigned[partition].log_id != log_id for partition, log_id in before.items())

    @scenario()
    async def test_diagnose_finds_no_error_in_a_healthy_broker(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(4, keys=4))
        member = await (await kit.member(broker)).hold(4)
        findings = await broker.diagnose()
        assert any(finding.level == "ok" for finding in findings), "no finding names what was checked"
        assert not [finding for finding in findings if finding.level == "error"]
        assert all(finding.cure for finding in findings if finding.level != "ok"), "a finding without a cure"
        await member.subscription.close()

    @scenario()
    async def test_declare_refuses_objects_of_another_broker(self, kit: Kit) -> None:
        broker = await kit.broker()
        with pytest.raises(BadSetting):
            await broker.declare(Topology(own=[object()]), apply=False)

    @scenario()
    async def test_declare_reports_the_changes_and_applies_them_on_request(self, kit: Kit) -> None:
        broker = await kit.broker(auto_declare=False)
        topology = Topology([TopicSpec(kit.topic, 3)])
        with pytest.raises(BrokerError):
            await broker.publish(kit.events(1))
        (change,) = await broker.declare(topology, apply=False)
        assert (change.what, change.action) == (f"topic {kit.topic}", "create")
        assert [change.action for change in await broker.declare(topology, apply=True)] == ["create"]
        assert not list(await broker.declare(topology, apply=True))
        other = Topology([TopicSpec(kit.topic, 5)])
        assert [change.action for change in await broker.declare(other, apply=False)] == ["refuse"]

    @scenario()
    async def test_a_process_with_another_partition_count_is_refused(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(1))
        other = await kit.broker(partitions=7)
        with pytest.raises(PartitionsDiffer, match=r"4.*7|7.*4"):
            await other.publish(kit.events(1))
        with pytest.raises(PartitionsDiffer):
            await kit.member(other)
