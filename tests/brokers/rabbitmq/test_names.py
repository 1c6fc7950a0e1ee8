"""Names of queues and exchanges: never the same for two things, and never too long."""

from hypothesis import given
from hypothesis import strategies as st

from onward.brokers.rabbitmq import names
from onward.settings import check_name

NAMES = st.text("ab.-0", min_size=1, max_size=6).filter(lambda name: name not in {".", ".."})
LONG = st.text("ab.", min_size=150, max_size=200)
PLACES: st.SearchStrategy[names.Place] = st.integers(0, 3) | st.just("work")


def of(topic: str, group: str, place: names.Place) -> dict[str, str]:
    """Every name that belongs to them, by what it is."""
    check_name("topic", topic)
    check_name("group", group)
    work = names.work_queue(topic, group)
    found = {
        "exchange": f"exchange {names.exchange(topic)}",
        "members": f"exchange {names.members_exchange(topic, group)}",
        "token": names.token_queue(topic, place, group),
        "aside": names.aside_stream(topic, group, place, 3),
        "next aside": names.aside_stream(topic, group, place, 4),
        "work": work,
        "tier": names.work_queue(topic, group, "critical"),
        "rung": names.rung_queue(work, 4_096_000),
        "tier's rung": names.rung_queue(names.work_queue(topic, group, "critical"), 4_096_000),
        "suspects": names.suspects_queue(topic, group),
        "registry": names.REGISTRY,
    }
    return found if isinstance(place, str) else found | {"stream": names.stream(topic, place)}


def identity(what: str, topic: str, group: str, place: names.Place) -> tuple[object, ...]:
    match what:
        case "registry":
            return (what,)
        case "exchange":
            return what, topic
        case "stream":
            return what, topic, place
        case "token" | "aside" | "next aside":
            return what, topic, group, place
        case _:
            return what, topic, group


@given(NAMES | LONG, NAMES | LONG, PLACES, NAMES | LONG, NAMES | LONG, PLACES)
def test_two_things_never_have_the_same_name(
    topic: str, group: str, place: names.Place, topic_2: str, group_2: str, place_2: names.Place
) -> None:
    ours = {name: identity(what, topic, group, place) for what, name in of(topic, group, place).items()}
    for what, name in of(topic_2, group_2, place_2).items():
        assert ours.get(name, identity(what, topic_2, group_2, place_2)) == identity(what, topic_2, group_2, place_2)


@given(LONG, LONG)
def test_long_names_fit(topic: str, group: str) -> None:
    for name in of(topic, group, 4_095).values():
        assert len(name.removeprefix("exchange ").encode()) <= names.MAX_NAME_BYTES


def test_the_usual_names_can_be_read() -> None:
    assert names.exchange("orders") == "onward.orders"
    assert names.stream("orders", 3) == "onward.orders.3"
    assert names.token_queue("orders.eu", 3, "billing") == "onward.orders.eu:billing:3.token"
    assert names.work_queue("orders", "billing") == "onward.orders:billing:work"
    assert names.rung_queue(names.work_queue("orders", "billing"), 1000) == "onward.orders:billing:work.rung.1000"


def test_retention_becomes_a_whole_number_of_seconds() -> None:
    assert names.stream_arguments(604_800.0)["x-max-age"] == "604800s"
    assert names.stream_arguments(0.0)["x-max-age"] == "1s"
    assert names.stream_arguments(1.2)["x-max-age"] == "2s"
