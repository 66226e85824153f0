"""Where the pieces of a bucket lie in the parameters of this rank, for workers that read them there."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from wsync.adapters.trainers.exchange import Layout, Piece, Pieces
from wsync.gather import aligned
from wsync.plan import Bucket
from wsync.pull.exports import Share
from wsync.regions import Region
from wsync.views import Place


def parts_of(bucket: Bucket, pieces: Pieces, layouts: Mapping[str, Layout]) -> tuple[Sequence[str], tuple[Share, ...]]:
    """Parameters, and what lies where in them; memories are counted in that order."""
    by_name: dict[str, list[tuple[Region, Piece]]] = defaultdict(list)
    for (name, region), piece in pieces.items():
        by_name[name].append((region, piece))
    numbers: dict[str, int] = {}
    parts = []
    for index, meta in enumerate(bucket.tensors):
        for region, piece in by_name[meta.name]:
            layout = layouts[piece.parent]
            memory = numbers.setdefault(piece.parent, len(numbers))
            for elements, there in aligned([region], layout.memory.select(piece.local)):
                place = Place(memory=memory, dtype=layout.dtype, region=there)
                parts.append(Share(tensor=index, elements=elements, place=place))
    return tuple(numbers), tuple(parts)
