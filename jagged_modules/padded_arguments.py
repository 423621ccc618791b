"""The arguments of a call of graphed.py, and the sizes of the buffers that they are copied into.

Sizes are rounded up to capacities. What is left of the buffers is a valid batch too: rows of zeros
in segments behind the real ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor

from .containers.candidates import CandidateIndex
from .containers.history_cache import HistoryCache
from .containers.jagged import Jagged
from .containers.pages import PagedRows, Room, UserTable, rows_of_events, tables_of
from .scalars import bucket_of, possessive, to_ints
from .segments import check_offsets, segmentation_of
from .settings import debug_checks

UNIT = 8  # capacities are multiples of it, unless the caller lists them
ROWS, OFFSETS, ORDER, SCALAR = "rows", "offsets", "order", "scalar"
USERS = "users"  # of rows in pages: `UserTable.users`
EVENTS = "events"  # the argument of `append`
Storage = tuple[Tensor, Tensor | None]  # and the scales
CONSTANTS = (bool, int, float, str, torch.dtype)


class Buckets(NamedTuple):
    """The capacities: multiples of UNIT, of which an octave has `steps`; or those of the list.
    rows: those of the rows of these arguments."""

    steps: int
    capacities: tuple[int, ...] | None = None
    rows: Mapping[str, tuple[int, ...]] = {}

    def of(self, size: int, argument: str | None = None) -> tuple[int, int] | None:
        """The smallest size of this size's bucket, and its capacity. None above all capacities."""
        capacities = self.capacities if argument is None else self.rows[argument]
        if capacities is None:
            capacity, unit = bucket_of(size, self.steps, UNIT)
            return (0 if capacity == unit else capacity - unit + 1), capacity
        place = bisect.bisect_left(capacities, size)
        if place == len(capacities):
            return None
        return (capacities[place - 1] + 1 if place else 0), capacities[place]


class Capacities(NamedTuple):
    """Of a leaf's size and of the rows that it counts; -1: it has none."""

    size: int
    rows: int


class Leaf(NamedTuple):
    """A tensor among the arguments. size: of its first dimension; of offsets and users, the number
    of segments. rows: that these count. keys: what the capacities of size and rows depend on: these
    numbers, or the argument whose rows have capacities of their own."""

    name: str
    kind: str
    tensor: Tensor
    size: int = -1
    rows: int = -1
    keys: tuple[int | str, int | str] = (-1, -1)

    def shape(self, capacities: Capacities) -> tuple[int, ...]:
        """The buffer's shape."""
        x = self.tensor.shape
        if self.kind == SCALAR:
            return tuple(x)
        return capacities.size + (self.kind == OFFSETS), *x[1:]


def capacities_of(leaves: Sequence[Leaf], buckets: Buckets) -> list[Capacities] | None:
    """The capacities of each leaf. None: there are none.

    Different sizes have different capacities, so that the first dimension of a result tells which
    size it has. Rows of a named argument have one, whatever other sizes are equal to theirs.

    The padding gets so many segments that none is longer than the mean of the real ones (rounded
    up, at least 1). So its rows cost what real rows cost, and meet every limit on the length of a
    segment that the batch meets. The number of segments is enough for the fewest rows of the
    bucket: it does not change with each batch.
    """
    numbers: dict[int | str, int] = {}
    segments: dict[int | str, list[int | str]] = {}
    for _, kind, _, size, rows, (size_key, rows_key) in leaves:
        if kind == OFFSETS:
            counted = segments.setdefault(size_key, [])
            if rows_key == rows:  # padding of named arguments is in the segments that there are
                counted.append(rows)
        if rows > numbers.get(rows_key, -1):
            numbers[rows_key] = rows
        if size > numbers.get(size_key, -1):
            numbers[size_key] = size
    found: dict[int | str, int] = {}
    smallest: dict[int | str, int] = {}  # of the bucket

    def add(key: int | str, spare: int = 0) -> bool:
        size = numbers[key]
        bucket = buckets.of(size + spare, key if isinstance(key, str) else None)
        if bucket is None:
            return False
        capacity = bucket[1]
        while capacity in found.values():
            capacity += UNIT
        found[key], smallest[key] = capacity, bucket[0]
        return True

    def need(key: int | str, of: int | str) -> int:
        fewest = max(smallest[of], min(numbers[of], found[of] // 2))
        return cdiv(found[of] - fewest, cdiv(fewest, numbers[key]))

    for key in numbers:
        if key not in segments and not add(key):
            return None
    for key in sorted(segments, key=numbers.__getitem__, reverse=True):
        needs = [need(key, rows) for rows in segments[key] if rows in found]
        if not add(key, max(needs, default=1)):
            return None
    of = found.get
    capacities = [Capacities(of(leaf.keys[0], -1), of(leaf.keys[1], -1)) for leaf in leaves]
    # rows whose number is that of other segments were not counted above
    for leaf, both in zip(leaves, capacities):
        if leaf.kind == OFFSETS and leaf.keys[1] == leaf.rows:
            if padding_step(leaf, both) > cdiv(leaf.rows, leaf.size):
                return None
    return capacities


def padding_step(leaf: Leaf, capacities: Capacities) -> int:
    """Rows of a padding segment."""
    return cdiv(capacities.rows - leaf.rows, capacities.size - leaf.size)


def cdiv(x: int, y: int) -> int:
    """x / y rounded up, at least 1 where y counts segments that may be none or empty."""
    return max(1, -(-x // max(1, y)))


# -- arguments -------------------------------------------------------------------------------------


class Arguments:
    """The tensors of a call's arguments, and a hashable description of everything else, `spec`,
    from which `build` makes arguments. forms: of the leaves, but for their sizes. storages: of rows
    in pages, constants of a graph, which keeps them. capacities: of the leaves, by the caller.
    named_rows: the arguments whose rows have capacities of their own."""

    capacities: Sequence[Capacities]

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Sequence[str],
        offsets: Mapping[str, str],
        named_rows: Collection[str] = (),
    ) -> None:
        named = {
            names[i] if i < len(names) else f"argument {i}": x for i, x in enumerate(args)
        } | kwargs
        # literals: list[Leaf]() and the like take far longer
        self.leaves: list[Leaf] = []
        self.forms: list[tuple[Any, ...]] = []
        self.storages: list[Storage] = []
        self._devices: set[torch.device] = set()  # but the host
        # one buffer for a tensor that is given twice: layers compare offsets by identity
        self._places: dict[tuple[int, str], int] = {}
        self._tables: dict[int, tuple[int, int | None]] = {}
        self._offsets = {
            name: _rows_of(name, owner, named)
            for name, owner in offsets.items()
            if named.get(name) is not None
        }
        self._unknown: list[tuple[int, CandidateIndex]] = []
        self._named_rows, self._argument = named_rows, None
        parts: list[tuple[str, tuple[Any, ...]]] = []
        for name, x in named.items():
            self._argument = name if name in named_rows else None
            parts.append((name, self._flatten(name, x)))
        self.spec = len(args), tuple(parts)
        for place, index in self._unknown:
            leaf = self.leaves[place]
            rows = self._candidates(leaf.name, index)
            keys = leaf.keys[0], leaf.keys[1] if isinstance(leaf.keys[1], str) else rows
            self.leaves[place] = leaf._replace(rows=rows, keys=keys)

    @property
    def sizes(self) -> set[int]:
        return {x for leaf in self.leaves for x in (leaf.size, leaf.rows)}

    @property
    def device(self) -> torch.device | None:
        """That of the arguments that are not on the host; the host, if all are there."""
        if len(self._devices) > 1:
            devices = sorted(map(str, self._devices))
            raise ValueError(f"arguments must be on one device, got {devices}")
        return next(iter(self._devices or (leaf.tensor.device for leaf in self.leaves)), None)

    def _flatten(self, name: str, x: Any) -> tuple[Any, ...]:
        if x is None:
            return "constant", None
        if isinstance(x, PagedRows) and x.host is not None:  # maps of selections are copied
            return self._flatten_pages(name, x, x.host)
        if isinstance(x, Jagged):
            return (
                "jagged",
                self._add(name, ROWS, x.values),
                self._add(name, OFFSETS, x.offsets, x.values.shape[0]),
                x.max_seqlen,
            )
        rows, whole = self._offsets.get(name), x
        if isinstance(x, Tensor):
            if x.is_nested or x.layout != torch.strided:
                raise TypeError(
                    f"{name} must be a dense tensor, got"
                    f" {'a nested tensor: pass a Jagged' if x.is_nested else x.layout}"
                )
            if rows is None:
                return "tensor", self._add(name, ROWS if x.dim() else SCALAR, x)
            check_offsets(name, x, rows)
            return "tensor", self._add(name, OFFSETS, x, rows)
        if isinstance(x, HistoryCache):
            layers = f"{possessive(name)} layers"
            parts = tuple([self._flatten(f"{layers}[{i}]", y) for i, y in enumerate(x.layers)])
            times: tuple[Any, ...] = "constant", None
            if x.timestamps is not None:
                times = self._flatten(name, x.timestamps)
            return "history", ("tuple", parts), times, x.max_rows
        if isinstance(x, CandidateIndex):
            if x.order is None:
                place = self._add(name, OFFSETS, x.offsets, -1 if rows is None else rows)
                if rows is None:
                    self._unknown.append((place, x))
                return "index", place, None, None
            orders = [
                self._add(name, ORDER, order) for order in (x.order, x.inverse) if order is not None
            ]
            return "index", self._add(name, OFFSETS, x.offsets, x.order.shape[0]), *orders
        if type(x) in (tuple, list):
            if (
                len(x) == 2
                and all(isinstance(part, Tensor) for part in x)
                and x[1].dim() == 1
                and not x[1].is_floating_point()
            ):
                if not x[0].dim():
                    raise ValueError(
                        f"{possessive(name)} values must have shape [L, ...], got"
                        f" {list(x[0].shape)}"
                    )
                check_offsets(f"{possessive(name)} offsets", x[1], x[0].shape[0])
                parts = (
                    ("tensor", self._add(name, ROWS, x[0])),
                    ("tensor", self._add(name, OFFSETS, x[1], x[0].shape[0])),
                )
            else:
                parts = tuple(self._flatten(f"{name}[{i}]", part) for i, part in enumerate(x))
            return type(x).__name__, parts
        if type(x) is dict:
            return "dict", tuple(
                (key, self._flatten(f"{name}[{key!r}]", part)) for key, part in whole.items()
            )
        if isinstance(x, CONSTANTS):
            return "constant", x, type(x)
        raise TypeError(
            f"{name} must be a tensor, Jagged, (values, offsets) pair or CandidateIndex, None, a"
            f" number or a string, or a tuple, list or dict of these, got {type(x).__name__}"
        )

    def _flatten_pages(self, name: str, x: PagedRows, table: UserTable) -> tuple[Any, ...]:
        room, stored = x.room, (x.storage, x.scales)
        if room is not None:
            stored = room.storage, room.scales
        self.storages.append(stored)
        if id(table) not in self._tables:  # that of all layers
            if not x.storage.is_cpu:
                self._devices.add(x.storage.device)
            events = None
            if table.events is not None:
                events = self._add(name, OFFSETS, *table.events, argument=EVENTS)
            users = self._add(name, USERS, table.users, table.num_rows)
            self._tables[id(table)] = users, events
        users, events = self._tables[id(table)]
        # a cache's storages are always the same ones
        of_storages = len(self.storages) - 1, *map(id, stored)
        return "pages", of_storages, users, table.page_rows, events, x.dtype

    def _add(
        self, name: str, kind: str, x: Tensor, rows: int = -1, argument: str | None = None
    ) -> int:
        leaves, seen = self.leaves, (id(x), kind)
        place = self._places.get(seen)
        if place is not None:
            return place
        place = self._places[seen] = len(leaves)
        on_host, shape = x.is_cpu, x.shape
        if not on_host:
            self._devices.add(x.device)
        size, *others = shape or (-1,)
        if kind == OFFSETS:
            size -= 1
        if argument is None or argument not in self._named_rows:
            argument = self._argument
        keys: tuple[int | str, int | str]
        if argument is None or size < 0:
            keys = size, rows
        else:
            keys = (size, argument) if kind in (OFFSETS, USERS) else (argument, rows)
        self.forms.append((kind, x.dtype, *others, on_host))
        leaves.append(Leaf(name, kind, x, size, rows, keys))
        return place

    def _candidates(self, name: str, index: CandidateIndex) -> int:
        """The number of candidates of a sorted index."""
        if index.host_counts is not None:
            return int(index.host_counts.sum())
        plain = {
            leaf.size
            for leaf in self.leaves
            if leaf.kind == ROWS and leaf.tensor.is_floating_point()
        }
        other = {leaf.rows for leaf in self.leaves if leaf.kind == OFFSETS} | {index.num_users}
        found = plain - other or plain
        if len(found) != 1:
            raise ValueError(
                f"{name} must be a CandidateIndex of known length beside several plain arguments,"
                " got one whose counts are on a device: name the candidates' argument,"
                f" graphed(..., offsets={{{name!r}: ...}})"
            )
        return found.pop()


def _rows_of(name: str, owner: str, arguments: Mapping[str, Any]) -> int:
    x = arguments.get(owner)
    x = x.values if isinstance(x, Jagged) else x
    if not isinstance(x, Tensor) or not x.dim():
        raise TypeError(
            f"{owner} must be a tensor with rows, which {name} count, got {type(x).__name__}"
        )
    return x.shape[0]


def build(
    spec: tuple[int, tuple[Any, ...]],
    storages: Sequence[Storage],
    tensors: Sequence[Tensor],
    rows: Sequence[int],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name, from the spec and the storages of `Arguments` and tensors
    in place of its leaves. rows: that each of them counts, if it is offsets or users."""
    (count, parts), make = spec, _Build(storages, tensors, rows)
    built = [(name, make(part)) for name, part in parts]
    return tuple(x for _, x in built[:count]), dict(built[count:])


class _Build:
    """`build` of a part. Layers in pages share their tables."""

    def __init__(
        self, storages: Sequence[Storage], tensors: Sequence[Any], rows: Sequence[int]
    ) -> None:
        self._storages, self._tensors, self._rows = storages, tensors, rows
        self._tables, self._room = dict[int, Any](), dict[tuple[int, int], Tensor]()

    def __call__(self, spec: tuple[Any, ...]) -> Any:
        (kind, *parts), tensors = spec, self._tensors
        if kind == "tensor":
            return tensors[parts[0]]
        if kind == "jagged":
            return Jagged.unchecked(tensors[parts[0]], tensors[parts[1]], parts[2])
        if kind == "index":
            return CandidateIndex(*(None if place is None else tensors[place] for place in parts))
        if kind == "dict":
            return {key: self(part) for key, part in parts[0]}
        if kind == "constant":
            return parts[0]
        if kind == "history":
            layers, timestamps = map(self, parts[:2])
            return HistoryCache(layers, timestamps, parts[2])
        if kind == "pages":
            return self._pages(*parts)
        built = [self(part) for part in parts[0]]
        return built if kind == "list" else tuple(built)

    def _pages(
        self,
        stored: tuple[int, ...],
        place: int,
        page_rows: int,
        events: int | None,
        dtype: torch.dtype,
    ) -> PagedRows:
        users, num_rows = self._tensors[place], self._rows[place]
        (storage, scales), room = self._storages[stored[0]], None
        if place not in self._tables:
            self._tables[place] = tables_of(users, page_rows, num_rows)
        offsets, table = self._tables[place]
        if events is not None:
            if (place, events) not in self._room:
                count, ends = self._rows[events], self._tensors[events]
                spare = storage.shape[0] - 1
                written = rows_of_events(users, ends, count, page_rows, spare)
                self._room[place, events] = written
            room = Room(storage, scales, self._room[place, events])
            storage, scales = storage[:-1], None if scales is None else scales[:-1]
        pages = Pages(table, page_rows, num_rows, scales)
        x = PagedRows(storage, offsets, pages, segmentation_of(offsets), dtype)
        x.room, x.slots = room, users[:, 1].long()
        return x


def check_values(leaf: Leaf, sizes: set[int]) -> None:
    """ValueError for wrong offsets, and for a plain argument that looks like offsets. Synchronises:
    for the batch of a capture only."""
    x = leaf.tensor
    if leaf.kind == OFFSETS:
        with debug_checks(True):
            check_offsets(f"{leaf.name}'s offsets", x, leaf.rows)
    if leaf.kind == ROWS and x.dim() == 1 and x.dtype in (torch.int32, torch.int64) and len(x) > 1:
        values = to_ints(x)
        if (
            values[0] == 0 < values[-1]
            and values[-1] in sizes - {leaf.size}
            and values == sorted(values)
        ):
            raise ValueError(
                f"{leaf.name} must be padded as offsets if it is what it looks like, got 0 to"
                f" {values[-1]} in ascending order: pass a Jagged or a (values, offsets) pair, or"
                f" name it, graphed(..., offsets={{{leaf.name!r}: ...}}); pass a map of candidates"
                " as a CandidateIndex"
            )
