"""An immutable mapping from worker numbers to values. Setting one value copies one page and the list of pages, so it
costs nearly the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")

_PAGE = 64


class Paged(Mapping[int, V], Generic[V]):
    """
    >>> one = Paged({3: "a"})
    >>> two = one.set(3, "b").set(100, "c")
    >>> dict(one), dict(two), dict(two.without(3))
    ({3: 'a'}, {3: 'b', 100: 'c'}, {100: 'c'})
    """

    __slots__ = ("_pages", "_size")

    def __init__(self, values: Mapping[int, V] | None = None) -> None:
        pages: dict[int, dict[int, V]] = {}
        for key, value in (values or {}).items():
            pages.setdefault(key // _PAGE, {})[key] = value
        self._pages: Mapping[int, Mapping[int, V]] = pages
        self._size = len(values or {})

    def set(self, key: int, value: V) -> Paged[V]:
        page = self._pages.get(key // _PAGE, {})
        return _paged({**self._pages, key // _PAGE: {**page, key: value}}, self._size + (key not in page))

    def without(self, key: int) -> Paged[V]:
        page = self._pages.get(key // _PAGE, {})
        if key not in page:
            return self
        return _paged({**self._pages, key // _PAGE: {k: v for k, v in page.items() if k != key}}, self._size - 1)

    def __getitem__(self, key: int) -> V:
        return self._pages[key // _PAGE][key]

    def __iter__(self) -> Iterator[int]:
        for number in sorted(self._pages):
            yield from sorted(self._pages[number])

    def __len__(self) -> int:
        return self._size


def _paged(pages: Mapping[int, Mapping[int, V]], size: int) -> Paged[V]:
    made: Paged[V] = Paged.__new__(Paged)
    made._pages = pages
    made._size = size
    return made
