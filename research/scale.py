"""The arithmetic of docs/scale.md: memory, time and communication of a training on N GPUs. Nothing is run.

    python -m research.scale    # prints the table of the page

Each GPU has ceil(B / N) rows of a batch of B. P parameters; w bytes for each that is gathered, 4, or 2 with bf16.

    train.sharding   bytes of weights, gradients, each optimizer state      bytes that each GPU sends in an update
    ddp              4 P                                                    2 (N - 1) / N 4 P
    fsdp             4 P / N, and embedding, output and two blocks whole    (N - 1) / N (w P_gathered + 4 P)

P_gathered counts blocks twice for each batch of an update, for the forward and for the backward pass, and embedding and output
once. Computing takes FLOPs / (utilization x peak), or as long as the host needs to launch kernels. Communication goes on
meanwhile: during the backward pass of the last batch (ddp), or all passes (fsdp). Exposed is what is left, and what nothing
hides: the gradient of the embedding, which is formed last, and under fsdp the gathering of embedding and output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullrank.analysis.size import size_of_run, training_memory
from fullrank.config.load import resolve
from fullrank.config.run import RunConfig

# an H100 SXM by its data sheet, in machines of eight
FLOPS = {"fp32": 67e12, "bf16": 989e12}  # a second, at its peak
UTILIZATION = 0.4  # of the peak
GPUS_PER_MACHINE = 8
LINK = 450e9  # bytes a second that a GPU sends to others of its machine
NETWORK = 400e9  # bytes a second that a machine sends; it is a part of as many rings as it has adapters
HOP = 10e-6  # seconds; a collective takes log2 N hops each way
LAUNCH = 8e-6  # seconds of the host for a kernel
LAUNCHES = 40  # kernels of a layer in a forward pass
RESERVED = 3.5 * 2**30  # bytes of CUDA, NCCL, gaps between tensors and a chunk of logits
BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends at a time


@dataclass(frozen=True)
class Estimate:
    """One update of a training on one of N GPUs: bytes, and seconds."""

    memory: float
    sent: float
    computing: float
    launching: float
    exposed: float
    tokens: int  # of all GPUs

    @property
    def update(self) -> float:
        """Seconds of the update."""
        return max(self.computing, self.launching) + self.exposed

    @property
    def bound(self) -> str:
        """The part that takes most of the update."""
        if self.exposed > max(self.computing, self.launching):
            return "links"
        return "computing" if self.computing >= self.launching else "launches"


def estimate(run: RunConfig, gpus: int) -> Estimate:
    """Estimate the training of a language model on `gpus` GPUs."""
    train, layers = run.train, run.model.num_hidden_layers
    size = size_of_run(run)
    parts, flops = size["parameters"], size["flops_per_token"]
    total, outside = parts["total"], parts["embedding"] + parts["output"]
    blocks = total - outside
    width = 2 if train.precision == "bf16" else 4
    batches = train.gradient_accumulation_steps
    tokens = -(-train.batch_size // gpus) * train.segment_length  # of a batch on one GPU
    sharded = train.sharding == "fsdp" and gpus > 1

    memory = training_memory(run, total, tokens)
    held: float = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    if sharded:
        held /= gpus
        held += width * (outside + 2 * blocks / layers) + (width + 4) * max(outside, blocks / layers)
        held += 4 * total if batches > 1 else 0  # whole gradients are summed

    passes, per_token = (4, 4 / 3) if train.activation_checkpointing else (3, 1)
    computing = batches * tokens * flops["training"] * per_token / (FLOPS[train.precision] * UTILIZATION)
    launching = batches * passes * layers * LAUNCHES * LAUNCH

    hop, share = math.ceil(math.log2(gpus)), (gpus - 1) / gpus
    if sharded:
        hidden_bytes = share * blocks * (2 * width * batches + 4)
        exposed_bytes = share * outside * (width * batches + 4)
        hidden_hops, exposed_hops = hop * layers * (2 * batches + 1), hop * (batches + 1)
        overlap = max(computing, launching)
    else:
        last = max(4 * parts["embedding"], min(BUCKET, 4 * total))
        hidden_bytes, exposed_bytes = 2 * share * (4 * total - last), 2 * share * last
        hidden_hops, exposed_hops = 2 * hop * math.ceil((4 * total - last) / BUCKET), 2 * hop
        overlap = max(computing, launching) * 2 / 3 / batches
    speed = LINK if gpus <= GPUS_PER_MACHINE else min(LINK, NETWORK)
    exposed = exposed_bytes / speed + (exposed_hops + 2 * hop) * HOP  # two ways for the loss
    exposed += max(0.0, hidden_bytes / speed + hidden_hops * HOP - overlap)
    return Estimate(
        memory=held + memory["activations"] + RESERVED,
        sent=hidden_bytes + exposed_bytes,
        computing=computing,
        launching=launching,
        exposed=exposed,
        tokens=train.batch_size * train.segment_length * batches,
    )


# -- the table of the page -------------------------------------------------------------------------------------------

LARGE = [
    "model.hidden_size=4096", "model.num_hidden_layers=32", "model.num_attention_heads=32", "model.intermediate_size=16384",
    "model.vocab_size=32000", "train.segment_length=2048", "train.sharding=fsdp", "train.activation_checkpointing=true",
]  # fmt: skip
MODELS = {
    "Mixhead B, 6 layers": ("mixhead/table1-vanilla", []),
    "Mixhead B, Transformer-XL, 16 layers": ("mixhead/table1-transformer-xl", []),
    "Mixhead B, 6.6 billion parameters": ("mixhead/table1-vanilla", LARGE),
}
BATCHES = {  # GPUs, rows and batches of an update
    "Mixhead B, 6 layers": [(1, 128, 1), (8, 128, 1), (64, 128, 1), (1024, 1024, 1)],
    "Mixhead B, Transformer-XL, 16 layers": [(1, 64, 1), (8, 64, 1), (64, 64, 1), (1024, 1024, 1)],
    "Mixhead B, 6.6 billion parameters": [(1, 8, 128), (8, 64, 16), (64, 1024, 1), (1024, 1024, 1)],
}


def table_lines() -> list[str]:
    """The table in Markdown."""
    header = ["model", "GPUs", "rows x batches of an update", "GiB", "ms", "MB", "tokens/s", "efficiency", "bound by"]
    lines = [header, ["---"] * len(header)]
    for model, (recipe, changes) in MODELS.items():
        for gpus, rows, batches in BATCHES[model]:
            settings = [f"train.batch_size={rows}", f"train.gradient_accumulation_steps={batches}"]
            run = resolve(recipe, "b", overrides=[*changes, *settings]).config
            many, alone = estimate(run, gpus), estimate(run, 1)
            busy = 1e3 * max(many.computing, many.launching)
            cells = [
                model,
                f"{gpus:,}",
                f"{rows:,} x {batches}",
                f"{many.memory / 2**30:.1f}",
                f"{busy:,.1f} + {1e3 * many.exposed:,.1f}",
                f"{many.sent / 1e6:,.0f}",
                f"{many.tokens / many.update:,.0f}",
                f"{100 * alone.update / many.update / gpus:.0f} %",
                many.bound,
            ]
            lines.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print("\n".join(table_lines()))
