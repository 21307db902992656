"""Random sequences with their keys and values in a paged cache, and what attention over them must give."""

from dataclasses import dataclass

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import AttentionBatch, KVShape, PagedKVCache


@dataclass
class Sequence:
    """One sequence: all of its keys and values; the last ``num_queries`` tokens are new."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_queries(self):
        return self.query.shape[0]

    @property
    def context(self):
        return self.key.shape[0]

    def cut(self, start, stop):
        """The same sequence when only its tokens ``start .. stop`` are new and none after them is there yet."""
        first = self.context - self.num_queries
        return Sequence(self.query[start - first : stop - first], self.key[:stop], self.value[:stop])


def random_sequence(generator, shape, num_heads, num_queries, context, dtype=torch.float32):
    """Normal numbers, rounded to ``dtype`` so that the reference sees what the cache holds; not to INT8."""
    dtype = torch.bfloat16 if dtype == torch.int8 else dtype
    draw = lambda *size: torch.randn(*size, generator=generator).to(dtype)  # noqa: E731 -- three uses, one line
    return Sequence(
        draw(num_queries, num_heads, shape.head_dim),
        draw(context, shape.num_kv_heads, shape.head_dim),
        draw(context, shape.num_kv_heads, shape.v_head_dim),
    )


class PagedBatch:
    """Sequences laid out in a cache, in blocks taken at random."""

    def __init__(self, ops, sequences, shape, *, block_size=16, dtype=torch.float32, seed=0, stale=0.0):
        counts = [-(-s.context // block_size) for s in sequences]
        self.ops = ops
        self.sequences = sequences
        self.layer = PagedKVCache([shape], sum(counts) + 1, block_size, dtype).layer(0)
        if stale:  # what earlier owners of a block left behind, in the places that hold numbers
            slots = torch.arange(self.layer.num_blocks * block_size)
            self.layer.write(
                slots,
                torch.full((len(slots), shape.num_kv_heads, shape.head_dim), stale),
                torch.full((len(slots), shape.num_kv_heads, shape.v_head_dim), stale),
            )
        free = torch.randperm(self.layer.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        for s, table in zip(sequences, self.tables, strict=True):
            slots = self.layer.context_slots(torch.tensor(table, dtype=torch.int32), s.context)
            ops.kv_write(s.key.flatten(1), s.value.flatten(1), slots, self.layer)

    def attend(self, tables=None, out_dtype=torch.float32, least_shared=(), **options):
        """Attention of all new tokens; one tensor a sequence."""
        counts = [s.num_queries for s in self.sequences]
        batch = AttentionBatch.of(counts, [s.context for s in self.sequences], tables or self.tables)
        query = torch.cat([s.query for s in self.sequences])
        plan = self.ops.plan_attention(batch, self.layer, query.shape[1], least_shared)
        out = self.ops.paged_attention(query, self.layer, plan, out_dtype=out_dtype, **options)
        return out.split(counts)


def expected(sequence, **options):
    """By the reference, in float64."""
    sinks = options.pop("sinks", None)
    return reference.attention(
        sequence.query, sequence.key, sequence.value, sinks=sinks, dtype=torch.float64, **options
    ).float()


def shape_of(num_kv_heads=2, head_dim=64, v_head_dim=None):
    return KVShape(num_kv_heads, head_dim, v_head_dim or head_dim)
