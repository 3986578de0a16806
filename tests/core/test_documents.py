"""Documents packed into one text: each is computed as if it stood alone."""

import itertools

import pytest
import torch

import fullrank as fr
from moving import narrow

BEGIN, VOCABULARY, N = 3, 11, 15
MODELS = {
    "rotary": {"position": "rotary", "attention": {"mix": "position_wise"}},
    "sinusoidal": {"position": "sinusoidal", "attention": {"normalize": "sigsoftmax", "mix": "position_independent"}},
    "learned": {"position": "learned", "max_position_embeddings": 9},
    "relative": {"position": "relative", "attention": {"score": "relative", "mix": "position_wise"}},
    "alibi": {"position": "alibi", "num_key_value_heads": 1},
    "t5": {"position": "t5", "attention": {"mix": "position_wise"}, "relative_attention_max_distance": 20},
    "none": {"position": "none", "attention": {"pattern": "strided", "stride": 2}},
    "dense synthesizer": {"position": "sinusoidal", "attention": {"score": "dense_synthesizer"}, "max_position_embeddings": 9},
    "random synthesizer": {"position": "none", "attention": {"score": "random_synthesizer"}, "max_position_embeddings": 9},
}  # fmt: skip


def build(**changes):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 4,
             "intermediate_size": 13, "document_token_id": BEGIN}  # fmt: skip
    return narrow(**sizes | changes)


def packed():
    """Two rows of documents of 1 to 8 tokens; the first row's first document has lost its beginning, as in a cut text."""
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(4, VOCABULARY, (2, N), generator=generator)
    for row, column in ((0, 5), (0, 6), (0, 12), (1, 0), (1, 7)):
        ids[row, column] = BEGIN
    return ids


def documents(row):
    """The first token of each document and the one after its last."""
    begins = [place for place, token in enumerate(row.tolist()) if token == BEGIN and place]
    return list(itertools.pairwise([0, *begins, len(row)]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_packed_documents_are_documents_by_themselves(name, kernel):
    """Logits, and the gradient of their sum, which is that of the documents one by one."""
    model = build(**MODELS[name])
    ids = packed()
    cotangent = torch.randn(2, N, VOCABULARY, dtype=torch.float64)
    with fr.kernel(kernel):
        logits = model(ids).logits
        logits.backward(cotangent)
        together = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        model.zero_grad()
        for row in range(2):
            for start, end in documents(ids[row]):
                alone = model(ids[row : row + 1, start:end]).logits
                assert torch.allclose(logits[row : row + 1, start:end], alone, atol=1e-12), (row, start, end)
                alone.backward(cotangent[row : row + 1, start:end])
    for key, parameter in model.named_parameters():
        assert torch.allclose(together[key], parameter.grad, atol=1e-10), key
    if model.max_length is None:  # without documents they see each other
        assert not torch.allclose(build(**MODELS[name] | {"document_token_id": None})(ids).logits, logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_knows_the_documents(name):
    """Cut anywhere, after crop and reorder; also with padding on the left whose id is the one that begins a document."""
    model = build(**MODELS[name])
    ids = packed()
    mask = torch.ones(2, N, dtype=torch.int64)
    mask[0, :3] = 0
    padded = ids.masked_fill(mask == 0, BEGIN)
    with torch.no_grad():
        for padding, read in ((None, ids), (mask, padded)):
            expected = model(read, attention_mask=padding).logits
            for cuts in ((5,), (1, 6, 7), (4, 13), tuple(range(1, N))):
                cache = model.new_cache()
                parts = []
                for start, end in itertools.pairwise((0, *cuts, N)):
                    new = None if padding is None else padding[:, start:end]
                    out = model(read[:, start:end], cache=cache, attention_mask=new)
                    parts.append(out.logits)
                    cache = out.cache
                seen = slice(None) if padding is None else padding.bool()
                assert torch.allclose(torch.cat(parts, 1)[seen], expected[seen], atol=1e-12)
        half = model(ids[:, :9], cache=model.new_cache()).cache
        assert torch.allclose(model(ids[:, 6:], cache=half.crop(6)).logits, model(ids).logits[:, 6:], atol=1e-12)
        swapped = half.reorder(torch.tensor([1, 0, 1]))
        logits = model(ids[[1, 0, 1], 9:], cache=swapped).logits
        assert torch.allclose(logits, model(ids).logits[[1, 0, 1], 9:], atol=1e-12)
        assert torch.allclose(model(ids, cache=half.crop(0)).logits, model(ids).logits, atol=1e-12)


def test_padding_is_left_out_of_documents():
    model = build(**MODELS["rotary"])
    ids = packed()[:1]
    mask = torch.ones(1, N + 4, dtype=torch.int64)
    mask[0, :4] = 0
    left = torch.cat((torch.full((1, 4), BEGIN), ids), dim=1)
    assert torch.allclose(model(left, attention_mask=mask).logits[:, 4:], model(ids).logits, atol=1e-12)
