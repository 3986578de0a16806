"""Lines to translations: what each line gets is what the search gives for it alone."""

import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.decoding import beam_search
from fullrank.experiments.translation import LineTranslator, Search, replace_unknown, translate_ids
from translation_runs import LINES, languages, write_run

SENTENCES = [[2, 3, 4], [5, 6], [7, 7, 7, 7, 7, 2], [3], [2, 9]]


def alone(model, ids, longest, **options):
    reader = model.of_source(model.encode(torch.tensor([[*ids, 0]])))
    return beam_search(reader, torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=longest, eos_id=0, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    return folder, write_run(folder, attention=fr.AttentionConfig(mix="position_wise"))


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_sentences_are_searched_as_alone_and_keep_their_order(run, batch_size):
    _, model = run
    search = Search(beams=3, n_best=2, length_penalty=0.6, no_repeat_ngram_size=2, max_length_a=0.5, max_length_b=3)
    translations = translate_ids(model, SENTENCES, search, source_eos=0, target_eos=0, batch_size=batch_size)
    for ids, best in zip(SENTENCES, translations, strict=True):
        longest = int(0.5 * (len(ids) + 1) + 3)
        expected = alone(
            model, ids, longest, beams=3, n_best=2, length_penalty=0.6, no_repeat_ngram_size=2, min_new_tokens=1
        )
        for n, candidate in enumerate(best):
            text = expected.ids[0, n, : int(expected.lengths[0, n])].tolist()
            assert [*candidate.ids, *([0] if candidate.tokens > len(candidate.ids) else [])] == text
            assert candidate.tokens == len(text) <= longest
            assert candidate.log_prob == pytest.approx(expected.log_probs[0, n].item(), abs=1e-10)
            assert candidate.score == pytest.approx(expected.scores[0, n].item(), abs=1e-10)


def test_long_sentences_make_smaller_batches(run):
    _, model = run
    widths = []
    encode = model.encode
    model.encode = lambda ids, mask=None: (widths.append(tuple(ids.shape)), encode(ids, mask))[1]
    try:
        search = Search(beams=1, max_length_a=0, max_length_b=1)
        translate_ids(model, [[2] * 511] * 3 + [[3]] * 4, search, source_eos=0, target_eos=0, batch_size=4)
    finally:
        del model.encode
    assert widths == [(1, 512)] * 3 + [(4, 2)]


def test_lines_become_text_and_empty_ones_stay_empty(run):
    folder, model = run
    source, target = languages()
    translations = LineTranslator(folder, Search(beams=2, n_best=2)).translate(LINES)
    assert len(translations) == len(LINES)
    for line, best in zip(LINES, translations, strict=True):
        if not line.strip():
            (empty,) = best
            assert (empty.text, empty.ids, empty.tokens, empty.log_prob, empty.score) == ("", (), 0, 0.0, 0.0)
            continue
        ids = [source.entries.index(word) if word in source.entries else source.unk_id for word in line.split()]
        expected = alone(model, ids, int(1.2 * (len(ids) + 1) + 10), beams=2, n_best=2, min_new_tokens=1)
        for n, candidate in enumerate(best):
            assert candidate.text == " ".join(target.entries[i] for i in expected.ids[0, n].tolist() if i)
            assert candidate.score == pytest.approx(expected.scores[0, n].item(), abs=1e-10)


def test_without_a_search_the_run_is_translated_as_it_is_judged(tmp_path):
    model = write_run(tmp_path, evaluation={"beams": 1, "max_length_a": 0.0, "max_length_b": 2, "length_penalty": 0.0})
    translating = LineTranslator(tmp_path)
    assert translating.search == Search(beams=1, max_length_a=0.0, max_length_b=2, length_penalty=0.0)
    (best,) = translating.translate(["ein hund"])[0]
    assert best.tokens <= 2
    expected = alone(model, [2, 3], 2, beams=1, min_new_tokens=1).log_probs.item()
    assert best.score == best.log_prob == pytest.approx(expected, abs=1e-10)


def test_entries_that_only_the_model_has_are_unknown_words():
    target = languages()[1]
    assert replace_unknown((3, len(target), len(target) + 5, len(target) - 1), target) == (3, 1, 1, len(target) - 1)


TARGETS = ["a dog sleeps .", "", "the park and nothing else", "x y z"]


def test_given_translations_are_scored_as_forced(run, tmp_path):
    """Each token by one pass of the model over the translation, and by the search that finds it."""
    folder, model = run
    second = write_run(tmp_path, attention=fr.AttentionConfig(mix="position_wise"), seed=5)
    source, target = languages()
    sources = [*[line for line in LINES if line.strip()][:3], ""]
    for folders, models in (([folder], [model]), ([folder, tmp_path], [model, second])):
        translator = LineTranslator(folders, batch_size=2)
        scored = translator.score(sources, TARGETS)
        for line, text, nll in zip(sources, TARGETS, scored, strict=True):
            x = torch.tensor([[*source.encode(line), source.eos_id]])
            y = [*target.encode(text), target.eos_id]
            probs = []
            for member in models:
                logits = member(x, torch.tensor([[target.eos_id, *y[:-1]]])).logits[0]
                probs.append(logits.double().softmax(-1)[range(len(y)), y])
            expected = -torch.stack(probs).mean(0).log()
            assert nll == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
        best = translator.translate(sources[:1])[0][0]
        if best.tokens > len(best.ids):  # ended by the model
            words = [" ".join(target.entries[i] for i in best.ids)]
            assert -sum(translator.score(sources[:1], words)[0]) == pytest.approx(best.log_prob, abs=1e-4)
    with pytest.raises(InputError, match="3 translations of 4 lines"):
        translator.score(sources, TARGETS[:3])
    write_run(tmp_path / "short", position="learned")
    with pytest.raises(InputError, match=r"--score: line 1 has 31 tokens with <eos>, .* at most 24"):
        LineTranslator(tmp_path / "short").score(["rot"], ["red " * 30])


def test_an_ensemble_of_one_run_twice_is_that_run(run, tmp_path):
    folder, _ = run
    once = LineTranslator(folder, Search(beams=2)).translate(LINES)
    twice = LineTranslator([folder, folder], Search(beams=2)).translate(LINES)
    checkpoints = LineTranslator(folder, Search(beams=2), checkpoint="best,best").translate(LINES)
    for first, second, third in zip(once, twice, checkpoints, strict=True):
        assert first[0].ids == second[0].ids == third[0].ids
        assert first[0].log_prob == pytest.approx(second[0].log_prob, abs=1e-5)
    write_run(tmp_path, seed=5)
    ensemble = LineTranslator([folder, tmp_path], Search(beams=2)).translate(LINES)
    assert [best[0].log_prob for best in ensemble] != [best[0].log_prob for best in once]
    write_run(tmp_path / "subwords", subwords=True)
    with pytest.raises(InputError, match="the list is empty"):
        fr.generate([], "")
    with pytest.raises(InputError, match="their vocabularies differ"):
        LineTranslator([folder, tmp_path / "subwords"])
