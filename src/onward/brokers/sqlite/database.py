"""What our statements need of a connection. It is one of our own, or one of the application."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol


class QueryResult(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """Its rows are tuples, and its texts are str."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> QueryResult: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...
