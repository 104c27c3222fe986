"""The training text is the same on every call and in every process."""

from pathlib import Path

from thinpoint.demo.corpus import corpus_bytes, corpus_files


def tree(root: Path) -> Path:
    for name, text in {
        "zlib_notes.py": "z",
        "abc.py": "abc",
        "pydoc_data/topics.py": "topics",
        "site-packages/other.py": "no",
        "test/test_abc.py": "no",
        "json/decoder.py": "json",
        "readme.txt": "no",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def test_documentation_comes_first_then_sources_by_name(tmp_path: Path) -> None:
    names = [path.relative_to(tmp_path).as_posix() for path in corpus_files(tree(tmp_path))]
    assert names == ["pydoc_data/topics.py", "abc.py", "json/decoder.py", "zlib_notes.py"]


def test_bytes_are_cut_at_the_limit(tmp_path: Path) -> None:
    assert corpus_bytes(8, tree(tmp_path)) == b"topicsab"
    assert corpus_bytes(1000, tmp_path) == b"topicsabcjsonz"


def test_this_python_has_enough_text() -> None:
    assert len(corpus_bytes(500_000)) == 500_000
