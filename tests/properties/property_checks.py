"""Properties of every model that can be configured, as functions of a `Combination`."""

import itertools
from dataclasses import replace

import torch

import fullrank as fr
from closeness import close
from combinations import FACTORS, HEADS, LENGTH, VOCABULARY, kernels_for, noisy, score_needs, tokens
from fullrank.training.optimizer import parameter_groups


def changing_a_token_changes_nothing_before(combination, training):
    model = combination.moved(**noisy(combination)).train(training)
    for kernel in kernels_for(model):
        with fr.kernel(kernel), torch.no_grad():
            read = tokens()
            torch.manual_seed(1)
            before = model(read).logits
            for place in range(LENGTH):
                other = read.clone()
                other[:, place] = (other[:, place] + 1 + torch.arange(2)) % VOCABULARY
                torch.manual_seed(1)
                after = model(other).logits
                assert torch.equal(before[:, :place], after[:, :place]), f"{kernel}: token {place} is seen too early"
                assert not torch.equal(before[:, place], after[:, place]), f"{kernel}: token {place} is not seen at all"


def no_gradient_from_the_future(combination):
    model = combination.moved(**noisy(combination)).train()
    embedded = []
    model.embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    for kernel in kernels_for(model):
        with fr.kernel(kernel):
            embedded.clear()
            logits = model(tokens()).logits
        for place in range(LENGTH):
            cotangent = torch.randn_like(logits[:, place])
            (gradient,) = torch.autograd.grad(logits[:, place], embedded[0], cotangent, retain_graph=True)
            assert torch.equal(gradient[:, place + 1 :], torch.zeros_like(gradient[:, place + 1 :])), (
                f"{kernel}: logits of token {place} depend on later embeddings"
            )
            assert gradient[:, place].abs().max() > 0


def starts_as_plain_attention(combination):
    """Bit for bit, on the logits of the whole model, through one kernel; closely across kernels."""
    plain = combination.but("mix", "none")
    with torch.no_grad():
        with fr.kernel("reference"):
            expected, mixed = plain.model()(tokens()).logits, combination.model()(tokens()).logits
        assert torch.equal(mixed, expected)
        fast = plain.model()(tokens()).logits
        assert (combination.model()(tokens()).logits - fast).abs().max() <= 1e-6 * max(1.0, float(fast.abs().max()))


def gates_start_as_plain_attention(combination):
    """Bit for bit through one kernel, and all other parameters start equal."""
    plain, gated = combination.but("gate", "none").model(), combination.model()
    state = plain.state_dict()
    assert all(".gate." in name or torch.equal(value, state[name]) for name, value in gated.state_dict().items())
    assert any(".gate." in name for name in gated.state_dict())
    with torch.no_grad(), fr.kernel("reference"):
        assert torch.equal(gated(tokens()).logits, plain(tokens()).logits)


def mixing_leaves_other_parameters_alone(combination):
    plain = combination.but("mix", "none").model().state_dict()
    mixed = combination.model().state_dict()
    assert plain.keys() <= mixed.keys()
    for name, value in plain.items():
        assert torch.equal(mixed[name], value), f"{name} starts otherwise than without mixing"
    marks = (".attend.mix.",) if _reads_query(combination) else (".attend.mix.", ".project.query.")
    for name in mixed.keys() - plain.keys():
        assert any(mark in name for mark in marks), f"{name} is none of mixing"


def _reads_query(combination):
    """True if the score reads the query; otherwise only mixing may."""
    return "scored" in score_needs(combination.score)


def evaluation_is_deterministic(combination):
    model = combination.moved(**noisy(combination))
    state = torch.get_rng_state()
    with torch.no_grad():
        first = model(tokens()).logits
        assert torch.equal(torch.get_rng_state(), state), "evaluation draws random numbers"
        torch.manual_seed(99)
        assert torch.equal(model(tokens()).logits, first)
        assert not torch.equal(model.train()(tokens()).logits, first)  # there is randomness that evaluation left out


TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}  # parameters rounded otherwise move logits by as much


def decoding_equals_one_pass(combination, dtype):
    """With a key/value cache and the text cut anywhere, also when rows begin with padding."""
    model = combination.moved(dtype=dtype)
    read = tokens(3, 12)
    padding = torch.ones(3, 12, dtype=torch.int64)
    padding[1, :4] = 0
    generator = torch.Generator().manual_seed(2)
    for mask in (None, padding):
        with torch.no_grad():
            expected = model(read, attention_mask=mask).logits
            for _ in range(3):
                cuts = torch.randperm(11, generator=generator)[: int(torch.randint(1, 11, (), generator=generator))]
                bounds = [0, *(cuts + 1).sort().values.tolist(), 12]
                cache = model.new_cache()
                parts = []
                for start, end in itertools.pairwise(bounds):
                    new = None if mask is None else mask[:, start:end]
                    out = model(read[:, start:end], cache=cache, attention_mask=new)
                    assert cache.length == start, "a cache is a value: a call leaves the one it was given alone"
                    before, cache = cache, out.cache
                    parts.append(out.logits)
                assert cache.length == 12
                again = model(read[:, start:], cache=before, attention_mask=None if mask is None else mask[:, start:])
                assert torch.equal(again.logits, parts[-1]), "two go on from one cache"
                seen = slice(None) if mask is None else mask.bool()
                close(torch.cat(parts, 1)[seen], expected[seen], f"cut at {bounds}", TOLERANCES[dtype])


def segments_with_memory_equal_one_pass(combination, dtype):
    """A memory as long as the text makes segments one pass, with cached keys or without; a short one is the same for every
    kernel, also where a layer rests."""
    read = tokens(3, 12)
    model = combination.moved(dtype=dtype, memory_length=12)
    with torch.no_grad():
        expected = model.with_memory(0)(read).logits
    for cached in (False, True):
        with torch.set_grad_enabled(not cached):
            close(_in_segments(model, read), expected, f"cached: {cached}", TOLERANCES[dtype])
    by_kernel = []
    for kernel in kernels_for(model):
        with fr.kernel(kernel):
            by_kernel.append(_in_segments(model.with_memory(3), read, resting=(1,)))
    for logits in by_kernel[1:]:
        close(logits, by_kernel[0], "kernels disagree", TOLERANCES[dtype])


def _in_segments(model, read, resting=()):
    """Logits of three segments, each after the memory of those before it; the layers that rest do so in the second one."""
    memory = None
    parts = []
    for skip, segment in zip(((), resting, ()), read.split((4, 1, 7), dim=1), strict=True):
        out = model(segment, memory, skip=skip)
        memory = out.memory
        parts.append(out.logits.detach())
    return torch.cat(parts, 1)


def padding_changes_nothing(combination, dtype):
    """A batch of texts of different lengths gives each text what it gets alone; padding on either side."""
    model = combination.moved(dtype=dtype)
    lengths = (7, 1, 4)
    texts = [tokens(1, length, seed=length) for length in lengths]
    for kernel in kernels_for(model):
        for left in (True, False):
            read = torch.randint(VOCABULARY, (3, 7))
            mask = torch.zeros(3, 7, dtype=torch.int64)
            places = [slice(7 - n, None) if left else slice(0, n) for n in lengths]
            for row, (text, place) in enumerate(zip(texts, places, strict=True)):
                read[row, place] = text[0]
                mask[row, place] = 1
            with fr.kernel(kernel), torch.no_grad():
                batch = model(read, attention_mask=mask).logits
                assert batch.isfinite().all()
                for row, (text, place) in enumerate(zip(texts, places, strict=True)):
                    side = "left" if left else "right"
                    close(batch[row, place], model(text).logits[0], f"{kernel}, {side}, row {row}", TOLERANCES[dtype])


def gradients_reach_every_parameter(combination, at_start):
    """And every single mixing weight, both at the start (no zero start hides one from the first step) and after it."""
    model = (combination.model if at_start else combination.moved)(dtype=torch.float64).train()
    model.loss(tokens(), tokens(seed=6)).backward()
    spreads = not at_start and {combination.mix_qkv, combination.mix_scores} & {"interleaved", "dynamic", "multi_token"}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
        largest = float(parameter.grad.abs().max())
        if name.endswith("attention.project.key.bias") and combination.weighted and _ignores_key_bias(model, spreads):
            assert largest < 1e-15, f"{name}: adding one number to all scores of a query cannot matter, {largest:.1e}"
        else:
            least = 0 if at_start else 1e-10  # Transformer-XL starts so small that some are 1e-15 at first
            unread = ".project.query." in name and not _reads_query(combination)  # but by mixing, through zeros
            least = -1 if at_start and (unread or is_factor(combination, name)) else least
            assert largest > least, f"{name}: gradient {largest:.1e}"
        if ".attend.mix." in name and not (at_start and is_factor(combination, name)):
            assert (parameter.grad != 0).all(), f"{name}: no gradient for some of its numbers"


def is_factor(combination, name):
    """True for a parameter of a product that starts at zero."""
    slots = {".attend.mix.": combination.mix, ".attend.mix_scores.": combination.mix_scores}
    return any(mark in name and choice in FACTORS for mark, choice in slots.items())


def _ignores_key_bias(model, spreads):
    """q.(k + b) adds one number to all scores of a query; a softmax, unlike sigsoftmax, does not see it, unless it spreads."""
    scores = torch.randn(1, HEADS, 2, 5, dtype=torch.float64)
    normalize = model.blocks[0].attention.attend.normalize
    changed = spreads or model.config.position == "rotary" or model.config.attention.qk_norm
    return not changed and torch.allclose(normalize(scores), normalize(scores + 1), atol=1e-9)


def weight_decay_spares_mixing(combination):
    """Decay would pull mixing towards nothing, not towards plain attention; cores, too, are scales."""
    model = combination.model()
    groups = parameter_groups(model, 0.1)
    decaying = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    spared = ("bias", "norm.weight", ".cores.weight", "_decay")
    for name, parameter in model.named_parameters():
        if ".attend.mix" in name or ".mix_qkv." in name or name.endswith(spared):
            assert id(parameter) not in decaying, f"{name} decays"
        elif parameter.ndim > 1:
            assert id(parameter) in decaying, f"{name} does not decay"


def saved_and_loaded(combination, dtype, folder):
    model = combination.moved(dtype=dtype)
    model.save(folder)
    torch.manual_seed(1234)
    loaded = fr.LanguageModel.load(folder)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == value.dtype, f"{name} changed its dtype"
        assert torch.equal(loaded.state_dict()[name], value), f"{name} changed"
    assert not loaded.training
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def meta_build_is_the_real_one(combination):
    with torch.device("meta"):
        imagined = fr.LanguageModel(combination.config())
    real = combination.model()
    assert all(tensor.is_meta for tensor in (*imagined.parameters(), *imagined.buffers()))
    assert _shapes(imagined) == _shapes(real)
    assert imagined.num_parameters() == real.num_parameters() == sum(p.numel() for p in real.parameters())


def _shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def double_precision_agrees(combination):
    single, double = combination.moved(), combination.moved().double()
    with torch.no_grad():
        logits = double(tokens()).logits
        assert logits.dtype == torch.float64
        close(single(tokens()).logits.double(), logits, "fp32 and fp64", 1e-5)


def learns(combination):
    """A text that repeats itself is learned in a few steps, with randomness on."""
    noise = noisy(combination, 0.05, 0.05, 0.1) | {"scale_embedding": True}
    noise["dropout"] = replace(noise["dropout"], embedding=0.0, activation=0.0, output=0.0)
    model = combination.model(**noise).train()
    text = torch.tensor([1, 4, 2, 8, 5, 7]).repeat(4)[None]
    inputs, targets = text[:, :15], text[:, 1:16]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0], f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
