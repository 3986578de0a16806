"""Rows that hold more than one text, told apart by position ids that begin again; and rows that hold padding."""

import leaky_models as leaky
import torch
from torch import nn

from museum.exhibit import CUT, Exhibit, Switched, another_document, plainly


class Packed(Switched):
    """Positions that begin again begin another text, which sees none before it.

    apart_with_mask: False: an attention mask, even one of ones, puts an end to that
    (https://github.com/huggingface/transformers/pull/46634). apart_under: the implementations that keep texts apart; plain
    sdpa did not (https://github.com/axolotl-ai-cloud/axolotl/pull/3796).
    """

    def __init__(self, *, apart_with_mask=True, apart_under=("eager", "sdpa")):
        super().__init__(lambda config: Attention())
        self.blocks[0].attention, self.blocks[2].attention = Attention(), Attention()
        self.positions = nn.Embedding(128, leaky.WIDTH)
        self.apart_with_mask = apart_with_mask
        self.apart_under = apart_under

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        seen = leaky.causal(input_ids.shape[1])
        apart = self.config._attn_implementation in self.apart_under
        if apart and (attention_mask is None or self.apart_with_mask):
            begins = torch.ones_like(position_ids)
            begins[:, 1:] = (position_ids[:, 1:] != position_ids[:, :-1] + 1).to(begins.dtype)
            document = begins.cumsum(1)
            seen = seen & (document[:, :, None] == document[:, None, :])
        if attention_mask is not None:
            seen = (seen & attention_mask.bool()[:, None, :]) | torch.eye(seen.shape[-1], dtype=torch.bool)
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            block.attention.seen = seen
            x = block(x)
        return self.output(x)


class MiniCPM3(Packed):
    """The mask never reaches attention: padding on the left is seen as if it were text.

    https://github.com/ml-explore/mlx-lm/issues/1906
    """

    def __init__(self, deaf):
        super().__init__(apart_under=())
        self.deaf = deaf

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return super().forward(input_ids, None if self.deaf else attention_mask, position_ids)


class Attention(leaky.Attention):
    def __init__(self):
        super().__init__(leaky.causal)
        self.seen = torch.ones(1, 1, dtype=torch.bool)  # (N, N) or (B, N, N), set by the model before a pass

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return scores.masked_fill(~self.seen, float("-inf")).softmax(-1) @ value


def _positions(ids):
    return torch.cat((torch.arange(CUT), torch.arange(ids.shape[1] - CUT))).expand_as(ids)


def _padded(model, ids):
    """Padding from the start up to `CUT`."""
    mask = (torch.arange(ids.shape[1]) >= CUT).long().expand_as(ids)
    return plainly(model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))


def _with_mask(model, ids):
    return plainly(model, ids, position_ids=_positions(ids), attention_mask=torch.ones_like(ids))


def _under_sdpa(model, ids):
    model.set_attn_implementation("sdpa")
    return plainly(model, ids, position_ids=_positions(ids))


EXHIBITS = [
    Exhibit(
        "transformers: packed texts with an attention mask",
        "https://github.com/huggingface/transformers/pull/46634",
        lambda: Packed(apart_with_mask=False),
        lambda: Packed(),
        another_document(_with_mask),
        frozenset({"packed documents are independent"}),
        layer="blocks.0.attention",
        remark="not kept apart where attention_mask is given, too",
    ),
    Exhibit(
        "axolotl: packed texts under plain sdpa",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3796",
        lambda: Packed(apart_under=("eager",)),
        lambda: Packed(),
        another_document(_under_sdpa),
        frozenset({"packed documents are independent"}),
        layer="blocks.0.attention",
    ),
    Exhibit(
        "MiniCPM3 of mlx-lm: padding on the left is seen",
        "https://github.com/ml-explore/mlx-lm/issues/1906",
        lambda: MiniCPM3(deaf=True),
        lambda: MiniCPM3(deaf=False),
        another_document(_padded),
        frozenset({"padding changes nothing"}),
        layer="blocks.0.attention",
    ),
]
