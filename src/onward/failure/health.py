"""Whether the application can bring every event to an end just now."""

import msgspec


class Health(msgspec.Struct, frozen=True):
    """`ready`: handlers run and nothing stands in their way; else `troubles` says what does."""

    ready: bool
    troubles: tuple[str, ...] = ()
