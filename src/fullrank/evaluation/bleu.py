"""How good translations are: BLEU and chrF by sacreBLEU with their signatures, tokenised BLEU, and tests of differences.

Scores of different signatures do not compare; every figure goes with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fullrank.evaluation.ngrams import check_pairs, metric_named, sacrebleu

TOKENISED_BLEU = (
    "tokenised, lower-cased BLEU4 (as fairseq-generate printed it, no smoothing); not comparable with sacreBLEU"
)


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, Any]:
    """BLEU and chrF (0 to 100) of detokenised text by sacreBLEU, one reference a sentence.

    `lowercase` ignores case in both. `bleu_signature` and `chrf_signature` are sacreBLEU's, with its version: they belong
    beside every published figure. `length_ratio` is words of the hypotheses over words of the references (13a tokens), and
    `brevity_penalty` what BLEU was multiplied by for being shorter.
    An empty hypothesis is a sentence without a match, not one that is left out.
    Raises InputError for different numbers of hypotheses and references, for none at all, and without sacreBLEU.
    """
    check_pairs(hypotheses, references)
    metrics = sacrebleu().metrics
    bleu, chrf = metrics.BLEU(lowercase=lowercase, tokenize="13a"), metrics.CHRF(lowercase=lowercase)
    found = bleu.corpus_score(list(hypotheses), [list(references)])
    return {
        "bleu": float(found.score),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": float(chrf.corpus_score(list(hypotheses), [list(references)]).score),
        "chrf_signature": str(chrf.get_signature()),
        "brevity_penalty": float(found.bp),
        "length_ratio": float(found.ratio),
        "sentences": len(hypotheses),
    }


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """BLEU4 (0 to 100) over white-space tokens of both sides as they are, in lower case, without smoothing.

    This is what fairseq-generate printed for IWSLT14, where hypotheses and references are tokenised (Moses), lower-cased and
    have their subwords joined. Tokenisation changes BLEU by points, so the label goes with the figure.
    Raises InputError for different numbers of hypotheses and references, and for none at all.
    """
    check_pairs(hypotheses, references)
    metric = metric_named("tokenised_bleu")
    score = metric.score(np.sum(metric.statistics(hypotheses, references), axis=0))
    return {"tokenised_bleu": float(score), "tokenised_bleu_label": TOKENISED_BLEU}
