"""Scoring loops, right and wrong ones in pairs: each fault is flagged by the finding that is named for it, and by no other."""

import math
import re

import pytest
import torch

import fullrank as fr
from fullrank.checking.scoring import ADD, COUNTS, LATER, ONCE, RANKS, SUM
from fullrank.core.errors import InputError

V, WINDOW = 5, 8
_generator = torch.Generator().manual_seed(3)
LOGITS = torch.randn(V + 1, V, generator=_generator, dtype=torch.float64)  # after a token; the last row: at the start
LOG_PROBS = (1.5 * LOGITS).log_softmax(-1)


def nll(ids, start=V):
    """Of each token, given the one before it."""
    return -LOG_PROBS[torch.cat((torch.tensor([start]), ids[:-1])), ids]


def report_of(score, **options):
    return fr.check_scoring(score, **{"vocab_size": V, "length": 19, "calls": 2000, **options})


def failed(score, **options):
    """Names of the findings that fail."""
    return {finding.check for finding in report_of(score, **options).failures}


def remark(score, name, **options):
    return str(report_of(score, **options).of(name).remark)


# -- right ones -------------------------------------------------------------------------------------------------------


def total(ids):
    return float(nll(ids).sum())


def means(ids):
    return {"perplexity": math.exp(float(nll(ids).mean())), "tokens": len(ids)}


def shifted(ids):
    """The first token is only read."""
    return {"nll": nll(ids)[1:], "tokens": len(ids) - 1}


def shifted_total(ids):
    return {"nll": float(nll(ids)[1:].sum()), "tokens": len(ids) - 1}


def last_window_reads_back(ids):
    """Blocks of four, read behind a start mark with the two tokens before them; a last, short one reads further back."""
    sums = 0.0
    for end in [*range(4, len(ids), 4), len(ids)]:
        read = ids[max(0, end - 6) : end]
        before = torch.cat((torch.tensor([V]), read[:-1]))
        mean = LOG_PROBS[before].cumsum(0) / torch.arange(1, len(read) + 1)[:, None]
        scores = -mean.log_softmax(-1).gather(1, read[:, None])
        sums += float(scores[-((end - 1) % 4 + 1) :].sum())
    return sums


@pytest.mark.parametrize("score", [nll, total, means, shifted, shifted_total])
def test_right_scorers_pass(score):
    report = fr.check_scoring(score, vocab_size=V, length=19, calls=2000)
    assert report.failures == ()
    assert report.of(SUM).verdict == "passes"


@pytest.mark.parametrize("score", [shifted, shifted_total])
def test_an_unscored_first_token_is_said(score):
    report = fr.check_scoring(score, vocab_size=V, length=19)
    assert "first token is not scored" in report.of(ONCE).remark
    assert report.description["first_token_scored"] is False
    assert fr.check_scoring(total, vocab_size=V).description["first_token_scored"] is True


def test_texts_may_be_the_rows_of_a_tensor():
    texts = torch.randint(V, (3, 19), generator=torch.Generator().manual_seed(5))
    of_tensor, of_list = report_of(nll, texts=texts), report_of(nll, texts=list(texts))
    assert of_tensor.findings == of_list.findings
    assert of_tensor.passes
    assert report_of(max).verdict == "fails"  # a builtin, whose arguments Python cannot tell


def test_a_text_that_is_scored_with_a_longer_context_at_its_end_is_said():
    report = report_of(last_window_reads_back, calls=1500)
    assert report.failures == ()
    assert "scores change with the number (not the identity) of later tokens" in report.of(SUM).remark


# -- wrong ones -------------------------------------------------------------------------------------------------------


def start_in_place_of_the_first(ids):
    scores = nll(ids)
    scores[0] = 0.25
    return scores


def dropped(ids):
    """The last batch of four is dropped where it is short."""
    return float(nll(ids)[: len(ids) // 4 * 4].sum())


def overlaps_twice(ids):
    return sum(total(ids[start : start + WINDOW]) for start in range(0, len(ids), 4))


def ahead(ids):
    """A token is likelier where the next one is the same."""
    scores = nll(ids)
    return torch.cat((torch.where(ids[1:] == ids[:-1], 0.5, 1.0) * scores[:-1], scores[-1:]))


@pytest.mark.parametrize(
    ("score", "name", "says"),
    [
        (start_in_place_of_the_first, ONCE, "0.25 nats that depend on no token"),
        (dropped, ONCE, "never scored"),
        (lambda ids: nll(ids) * (torch.arange(len(ids)) < max(1, len(ids) // 4 * 4)), ONCE, "never scored"),
        (lambda ids: nll(ids) * (torch.arange(len(ids)) != 3), ONCE, r"tokens 3 \(counted from 0\): never scored"),
        (overlaps_twice, ONCE, "scored again"),
        (lambda ids: 2 * nll(ids), SUM, "add up to"),
        (lambda ids: -LOG_PROBS[ids, ids], SUM, "knows the token"),
        (ahead, LATER, "changes the scores of tokens before it"),
        (lambda ids: float(ahead(ids).sum()), SUM, "earlier scores change with later tokens"),
    ],
)
def test_wrong_scorers_fail_the_check_that_is_named_for_the_fault(score, name, says):
    report = report_of(score, calls=4000)
    assert {name} <= {finding.check for finding in report.failures} <= {name, SUM, LATER}
    assert re.search(says, report.of(name).remark), report.of(name).remark


def test_a_window_that_is_named_is_passed_twice():
    def late(ids):
        """From token 64 on windows overlap by one, which counts again."""
        return total(ids) + float(nll(ids)[63::64].sum() if len(ids) > 64 else 0)

    assert failed(late, length=40) == set()
    assert failed(late, length=40, window=64) == {ONCE}


# -- several texts in a call ------------------------------------------------------------------------------------------


def batch(texts):
    return {"nll": sum(total(ids) for ids in texts), "tokens": sum(map(len, texts))}


def padding_in_count(texts):
    return {"nll": sum(total(ids) for ids in texts), "tokens": len(texts) * max(map(len, texts))}


@pytest.mark.parametrize(
    "score", [batch, lambda texts: [nll(ids) for ids in texts], lambda texts: [total(ids) for ids in texts]]
)
def test_right_batches_pass(score):
    assert failed(score, many=True) == set()
    assert fr.check_scoring(score, vocab_size=V, many=True).of(ADD).verdict == "passes"


def test_wrong_counts_of_batches_fail():
    assert failed(padding_in_count, many=True) == {COUNTS}


def of_rank(ids, rank, world_size):
    scores = nll(ids)[rank::world_size]
    return {"nll": float(scores.sum()), "tokens": len(scores)}


def test_totals_and_counts_of_ranks_add_up():
    assert fr.check_scoring(of_rank, vocab_size=V).of(RANKS).verdict == "passes"


# -- counts -----------------------------------------------------------------------------------------------------------

PIECES = [" über", " a", ".", " the", "\n"]


def of_string(text):
    """A function of a str, which cuts it into tokens itself."""
    ids = torch.tensor([PIECES.index(piece) for piece in re.findall(r" \w+|\.|\n", text)])
    return {"nll": nll(ids), "tokens": len(ids), "words": len(text.split()), "bytes": len(text.encode())}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": lambda text, result: result["tokens"] + 1}, '"tokens" is'),
        ({"words": lambda text, result: text.count(" ")}, '"words" is'),
        ({"bytes": lambda text, result: len(text)}, '"bytes" is'),
        ({"perplexity": lambda text, result: float(result["nll"].mean())}, '"perplexity" is'),
        ({"loss": lambda text, result: float(result["nll"].sum()) / (result["tokens"] + 1)}, '"loss" is'),
    ],
)
def test_wrong_denominators(change, says):
    def wrong(text):
        result = of_string(text)
        return result | {key: value(text, result) for key, value in change.items()}

    strings = {"vocab_size": None, "vocabulary": PIECES}
    assert failed(of_string, **strings) == set()
    assert failed(wrong, **strings) == {COUNTS}
    assert says in remark(wrong, COUNTS, **strings)


def test_first_token_counted_though_it_is_not_scored():
    assert failed(lambda ids: {"nll": nll(ids)[1:], "tokens": len(ids)}) == {COUNTS}
    assert failed(lambda ids: {"nll": float(nll(ids)[1:].sum()), "tokens": len(ids)}) == {COUNTS}


def test_texts_that_are_cut_by_their_length_add_up():
    """Two halves, each read by itself: scores depend on the number of later tokens, and every length adds up to one."""
    report = fr.check_scoring(lambda ids: sum(float(nll(part).sum()) for part in ids.chunk(2)), vocab_size=V)
    assert report.passes, report


def test_what_is_no_function_is_refused():
    with pytest.raises(InputError, match="score: a function from a text to its nll, given float"):
        fr.check_scoring(1.5, vocab_size=5)
