"""What has to be installed: for the Hub's ways in torch and transformers alone; an old transformers is called that."""

import configparser
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from conftest import run
from packaging.requirements import Requirement
from tiny_models import prompt_ids

from hf_ssr import version
from hf_ssr.command import exporting

ROOT = Path(__file__).parent.parent
REASONER = ROOT / "model_cards" / "tiny-reasoner"
PROMPT = """Keep the ledger of Paula from 26.
1 lunch: +10
2 pens: +63
3 shoes: -20
4 juice: -53
5 coffee: +71"""


def needed_by(*names: str) -> dict[str, metadata.Distribution]:
    """The distributions of these names, and all that they require."""
    found, left = {}, list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in found:
            found[name] = metadata.distribution(name)
            requirements = map(Requirement, found[name].requires or ())
            left += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory) -> Path:
    """The interpreter of a new environment: links to torch, transformers and what they require, and nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for distribution in needed_by("torch", "transformers").values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def into_cache(cache: Path, name: str, folder: Path) -> None:
    """A repository as `huggingface_hub` keeps what it has downloaded: files by their hash, and links to them."""
    repository, commit = cache / f"models--{name.replace('/', '--')}", hashlib.sha1(name.encode()).hexdigest()
    for path in filter(Path.is_file, folder.rglob("*")):
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        link = repository / "snapshots" / commit / path.relative_to(folder)
        for new in (blob, link):
            new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["folders", "hub"])
def test_torch_and_transformers_will_do(fresh_python, where, tmp_path):
    """Both ways in, from folders and from the Hub's cache without network."""
    code, model, home = tmp_path / "code", tmp_path / "model", tmp_path / "home"
    exporting.export(code)
    shutil.copytree(REASONER, model)
    exporting.export(model)
    names = [str(code), str(model)]
    if where == "hub":
        names = ["somebody/ssr", "somebody/reasoner-ssr"]
        for name, folder in zip(names, (code, model), strict=True):
            into_cache(home / "hub", name, folder)
            shutil.rmtree(folder)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS") if name in os.environ}
    result = subprocess.run(
        [fresh_python, Path(__file__).with_name("fresh_routes.py"), *names, PROMPT],
        env={**kept, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("custom_generate: ") == result.stdout.count("from_pretrained: ") == 2


def test_every_package_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hf_ssr").rglob("__init__.py")}
    mapped = {line.split(" = ")[0] for line in settings["options"]["package_dir"].split("\n") if line}
    assert set(settings["options"]["packages"].split()) == found | mapped
    assert settings["options.package_data"]["hf_ssr"] == "py.typed" and (ROOT / "hf_ssr" / "py.typed").exists()


def test_the_oldest_transformers_is_the_same_everywhere():
    floor = version.TRANSFORMERS_FLOOR
    assert f"\n    transformers>={floor}\n" in (ROOT / "setup.cfg").read_text()
    assert f"any transformers from {floor} on" in (ROOT / "README.md").read_text()
    assert f"needs transformers {floor} or newer" in (ROOT / "model_cards" / "ssr" / "README.md").read_text()


def test_an_old_transformers_is_named_before_it_is_imported(tmp_path):
    """It may break in its own ways: that one's `import` says nothing of versions."""
    (tmp_path / "transformers-4.57.6.dist-info").mkdir()
    (tmp_path / "transformers-4.57.6.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.57.6\n")
    (tmp_path / "transformers.py").write_text("raise ImportError('cannot import name')\n")
    message = (
        f"hf_ssr needs transformers {version.TRANSFORMERS_FLOOR} or newer, but 4.57.6 is installed: "
        f'pip install -U "transformers>={version.TRANSFORMERS_FLOOR}"'
    )
    calls = {
        "from hf_ssr import SSRConfig": ("ImportError", 1),
        "import hf_ssr; hf_ssr.generate": ("ImportError", 1),
        "import sys; from hf_ssr.__main__ import main; sys.argv = ['hf-ssr', 'demo']; main()": ("hf-ssr", 2),
    }
    for call, (begin, status) in calls.items():
        result = subprocess.run(
            [sys.executable, "-c", call],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
        )
        lines = result.stderr.splitlines()
        assert (result.returncode, lines[-1]) == (status, f"{begin}: {message}")
        assert begin == "ImportError" or len(lines) == 1


@pytest.mark.parametrize(
    ("installed", "is_old"),
    [("4.57.6", True), ("5.9.0", True), ("5.23.0", True), ("5.24.0", False), ("5.24.0.dev0", False), ("6.0", False)],
)
def test_which_are_old(installed, is_old, monkeypatch):
    monkeypatch.setattr(version, "TRANSFORMERS_FLOOR", "5.24")
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    if is_old:
        with pytest.raises(ImportError, match=f"but {re.escape(installed)} is installed"):
            version.check_transformers()
    else:
        version.check_transformers()


def test_an_old_transformers_refuses_the_folder(model, tmp_path, monkeypatch):
    """transformers reads the folder's `requirements.txt` itself."""
    exporting.export(tmp_path)
    monkeypatch.setattr(metadata, "version", lambda name: "5.23.0")
    with pytest.raises(ImportError, match=rf"transformers>={version.TRANSFORMERS_FLOOR} \(installed: 5\.23\.0\)"):
        run(model, prompt_ids(), {"max_new_tokens": 4}, custom_generate=str(tmp_path), trust_remote_code=True)


def test_the_commit_that_a_bench_names(tmp_path):
    """Of a checkout of this project, not of a repository that holds an environment with the package in it."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    def commit_of(package: Path) -> str | None:
        package.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "hf_ssr" / "version.py", package)
        return runpy.run_path(str(package / "version.py"))["commit"]()

    package = tmp_path / "hf_ssr"
    assert commit_of(package) is None  # no repository
    git("init", "-q")
    assert commit_of(package) is None  # no commit
    git("add", "hf_ssr")
    git("commit", "-qm", "x")
    head = git("rev-parse", "--short", "HEAD")
    (tmp_path / "README.md").write_text("changed, but no part of the package")
    assert commit_of(package) == head
    (package / "new.py").write_text("")
    assert commit_of(package) == f"{head}, dirty"
    assert commit_of(tmp_path / ".venv" / "site-packages" / "hf_ssr") is None
