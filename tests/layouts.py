"""Layouts of every kind at odd sizes, of two texts where they have a mask or documents."""

from dataclasses import replace

import torch

import fullrank as fr

PADDED = torch.ones(2, 13, dtype=torch.bool)
PADDED[0, :4] = False
PADDED[0, 8] = False
PADDED[1, 9:] = False
EMPTY = PADDED.clone()
EMPTY[1] = False  # a sequence without any token
runs = fr.Layout.from_runs
PACKED = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2]])


def with_documents(layout):
    return replace(layout, documents=PACKED)


LAYOUTS = {
    "causal": fr.Layout.of(13),
    "past": fr.Layout.of(9, 13),
    "one query": fr.Layout.of(1, 13),
    "padding": fr.Layout.of(13, key_mask=PADDED),
    "past and padding": fr.Layout.of(7, 13, key_mask=EMPTY),
    "one mask for all": fr.Layout.of(7, 13, key_mask=PADDED[:1]),
    "window": fr.Layout.of(11, 13, window=4),
    "window of one": fr.Layout.of(6, 9, window=1),
    "window that hides nothing": fr.Layout.of(5, 9, window=9),
    "window and padding": fr.Layout.of(11, 13, key_mask=PADDED, window=6),
    "documents": with_documents(fr.Layout.of(13)),
    "documents and past": with_documents(fr.Layout.of(5, 13)),
    "documents and padding": with_documents(fr.Layout.of(13, key_mask=PADDED)),
    "documents and one mask": with_documents(fr.Layout.of(7, 13, key_mask=PADDED[:1])),
    "documents and window": with_documents(fr.Layout.of(11, 13, window=4)),
    "gap": runs(13, ((0, 9), (15, 20))),
    "gap beyond the segment": runs(13, ((0, 9), (50, 20))),
    "no earlier key beside the segment": runs(11, ((-40, 17), (0, 11))),
    "three runs": runs(7, ((-90, 5), (-20, 3), (-4, 11))),
    "gap of one": runs(10, ((0, 6), (7, 3), (11, 12))),
    "gaps and window": runs(9, ((0, 2), (4, 1), (6, 10)), window=7),
    "window that ends in a gap": runs(6, ((0, 9), (30, 10)), window=12),
    "window that ends in an old run": runs(6, ((0, 9), (14, 10)), window=16),
    "window that hides an old run from some": runs(9, ((0, 4), (6, 5), (14, 12)), window=11),
    "window that hides an old run from later rows": runs(9, ((0, 4), (14, 12)), window=18),
    "one query after a gap": runs(1, ((0, 9), (15, 4), (40, 1))),
    "one query, gap and window": runs(1, ((0, 6), (9, 5)), window=8),
    "cross": fr.Layout.of(7, 13, causal=False),
    "cross, more queries": fr.Layout.of(15, 4, causal=False),
    "cross and padding": fr.Layout.of(7, 13, causal=False, key_mask=EMPTY),
}
