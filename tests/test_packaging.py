"""What users get: the wheel, its metadata, an import that needs torch alone, and documents whose
code and commands work."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from marks import slow_after
from readme import examples

from . import warm

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = {
    "jagged_modules": ROOT / "jagged_modules",
    "jagged_kernels": ROOT / "kernels" / "jagged_kernels",
    "jagged_modules/examples": ROOT / "examples",
}
# of examples/: for other compilers and other programs than Python's, and what is of a clone alone
NOT_INSTALLED = {"cpp", "docker", "results", "weights"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OPTIONAL = {"triton", "torchrec", "fbgemm_gpu"}
# Hosts that the project may name in an address. Package indexes are the user's to choose, so none
# belongs here.
HOSTS = {
    "github.com",
    "arxiv.org",
    "pytorch.org",
    "docs.pytorch.org",
    "grouplens.org",
    "www.w3.org",
    "localhost",
    "127.0.0.1",
}
# of published data sets, in the table of examples/data/datasets.py alone
DATA_HOSTS = {
    "ailab.criteo.com",
    "amazon-reviews-2023.github.io",
    "files.grouplens.org",
    "kuairand.com",
    "mcauleylab.ucsd.edu",
    "raw.githubusercontent.com",
    "snap.stanford.edu",
    "tianchi.aliyun.com",
    "www.yelp.com",
    "zenodo.org",
}


def run(*command, cwd=ROOT, env=None):
    """Output of a command; its error text is the failure message."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked_files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run("git", "ls-files", "-z").split("\0") if name]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, without network."""
    pytest.importorskip("setuptools", "77")
    source, out = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("dist")
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "build", "_build", "dist", "*.egg-info", "runs"
        ),
    )
    run(
        sys.executable,
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})",
        cwd=source,
    )
    (sdist,) = out.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist):
    """A wheel built from the source distribution, as an index user gets it, without network."""
    out = sdist.parent
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    # a workflow sets it
    without_address = {
        name: value for name, value in os.environ.items() if name != "GITHUB_REPOSITORY"
    }
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, env=without_address)
    (wheel,) = out.glob("*.whl")
    return wheel


def files_of_packages(of_folder):
    """Paths of the packages' files, below `of_folder(package)`."""
    return {
        f"{of_folder(package)}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not (package == "jagged_modules/examples" and NOT_INSTALLED & {*path.parts})
    }


def test_wheel_holds_exactly_the_packages(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_of_packages(lambda package: package)


def test_sdist_holds_the_packages_and_what_describes_them(sdist):
    with tarfile.open(sdist) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    described = {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "MANIFEST.in",
        "pyproject.toml",
        "setup.py",
    }
    generated = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert (
        names - generated
        == files_of_packages(lambda package: PACKAGES[package].relative_to(ROOT).as_posix())
        | described
    )


def test_each_file_names_the_same_version(metadata):
    import jagged_modules

    cited = re.search(
        r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )[1]
    changes = re.findall(
        r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert metadata["Version"] == jagged_modules.__version__ == cited
    assert changes[0] == "Unreleased" and cited in changes


@pytest.fixture(scope="module")
def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(archive.read(name).decode())


def test_wheel_metadata(wheel, metadata):
    # nothing here says where the project is published
    assert metadata.get_all("Project-URL") is None
    requirements = metadata.get_all("Requires-Dist")
    assert metadata["Name"] == "jagged-modules" and metadata["Requires-Python"] == ">=3.10"
    assert [re.split(r"\W", item)[0] for item in requirements if "extra ==" not in item] == [
        "torch"
    ]
    assert set(metadata.get_all("Provides-Extra")) == {
        "torchrec",
        "triton",
        "notebooks",
        "serve",
        "serve-more",
        "tensorboard",
        "parquet",
        "docs",
        "dev",
    }
    assert any(file.endswith("licenses/LICENSE") for file in zipfile.ZipFile(wheel).namelist())


def test_links_lead_to_the_repository_where_its_address_is_known(sdist, tmp_path):
    """As in the release workflow. A package index shows the README, and not the files that it links
    to."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command = (
        "from setuptools import build_meta;"
        f" build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    )
    env = dict(
        os.environ,
        GITHUB_REPOSITORY="owner/name",
        GITHUB_REF_NAME="v9",
        GITHUB_SERVER_URL="https://github.com",
        DOCS_URL="",
    )
    run(sys.executable, "-c", command, cwd=source, env=env)
    (path,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(path.read_text(encoding="utf-8"))
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert urls["Repository"] == "https://github.com/owner/name"
    assert urls["Documentation"] == "https://github.com/owner/name/blob/v9/docs/index.md"
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    shown = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    assert len(shown) == len(links)
    for link, absolute in zip(links, shown):
        kind = "raw" if link.endswith(".png") else "blob"
        assert absolute == (
            link if link.startswith("https:") else f"https://github.com/owner/name/{kind}/v9/{link}"
        )


def test_torchrec_extra_is_what_torchrec_needs_and_keeps_torch(metadata):
    """A bound on torch, torchrec or fbgemm-gpu would replace a torch that works."""
    extra = {
        item.partition(";")[0].strip()
        for item in metadata.get_all("Requires-Dist")
        if re.search(r"extra == .torchrec.", item)
    }
    needs = importlib.metadata.requires("torchrec")
    names = {re.split(r"[^\w-]", item)[0] for item in needs} - {"fbgemm-gpu"}
    assert len(names) > 3 and names <= extra
    assert not {name for name in extra if re.match(r"torch(rec)?\b|fbgemm|.*[<>=~]", name)}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_tested_sets_are_in_the_table_of_sets(name):
    pins = dict(
        re.findall(
            r"^([\w-]+)==(\S+)", (ROOT / "constraints" / f"{name}.txt").read_text(), re.MULTILINE
        )
    )
    fbgemm = pins["fbgemm-gpu-cpu" if name == "cpu" else "fbgemm-gpu"]
    (row,) = re.findall(
        rf"^\|.*`constraints/{name}.txt`.*",
        (ROOT / "docs" / "install.md").read_text(),
        re.MULTILINE,
    )
    assert row.startswith(f"| {pins['torch']} | {pins['torchrec']} | {fbgemm} |")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_locks_pin_all_that_is_installed(name, metadata):
    """`make lock` was run: what the extras name and what constraints/*.in pins has one version."""
    folder = ROOT / "constraints"
    pinned = re.findall(r"^([\w.-]+)==\S+", (folder / f"{name}.txt").read_text(), re.MULTILINE)
    named = [re.match(r"[\w.-]+", item)[0] for item in metadata.get_all("Requires-Dist")]
    others = {"triton"} if name == "cpu" else set()  # the Makefile's
    assert len(named) > 30 and {x.lower() for x in named} - others <= {*pinned}
    exact = re.findall(r"^\S+==\S+$", (folder / f"{name}.in").read_text(), re.MULTILINE)
    assert len(exact) > 6 and {*exact} <= {*(folder / f"{name}.txt").read_text().splitlines()}


def test_images_are_made_of_what_the_project_has(metadata):
    """Files, programs, extras and pinned versions of the Dockerfile. No image is built here."""
    text = (ROOT / "examples" / "docker" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    files = " ".join(copied).split() + re.findall(r'"(examples/\w+\.py)"', text)
    assert len(files) > 9 and [file for file in files if not (ROOT / file).exists()] == []
    (extras,) = re.findall(r'"\.\[(.*)\]"', text)
    assert {*extras.split(",")} <= {*metadata.get_all("Provides-Extra")}
    for variant, fbgemm in {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}.items():
        command = f"VARIANT={variant}; echo" + re.search(r"--no-deps( torchrec .*)", text)[1]
        names = run("sh", "-c", command).split()
        pinned = (ROOT / "constraints" / f"{variant}.txt").read_text()
        assert names == ["torchrec", fbgemm]
        assert all(re.search(rf"^{name}==", pinned, re.MULTILINE) for name in names)


def test_installed_wheel_runs_without_the_source_tree(wheel, tmp_path):
    target = tmp_path / "site"
    run(
        sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel
    )
    # -S: no site-packages, so no editable installation either; torch comes from there by an
    # explicit path, after the target.
    paths = [str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    script = (
        f"import sys; sys.path += {paths!r}; import jagged_modules,"
        f" jagged_kernels\n{examples('README.md')[0]}\n"
    )
    script += "print(jagged_modules.__file__, jagged_kernels.__file__, sep='\\n')"
    *_, modules, kernels = run(sys.executable, "-I", "-S", "-c", script, cwd=tmp_path).splitlines()
    assert Path(modules).is_relative_to(target) and Path(kernels).is_relative_to(target)


def test_programs_of_the_installed_wheel(wheel, tmp_path):
    """They find the modules and files beside them, without the source tree."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    env = dict(os.environ, PYTHONPATH=str(tmp_path))

    def program(*arguments):
        done = warm.run(["-m", "jagged_modules.examples", *arguments], cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = dict(line.split(maxsplit=1) for line in program().splitlines())
    assert {"train_dlrm", "serve_ranking"} <= {*listed}
    assert listed["train_hstu"] == "Trains a next-item model on histories"
    log = [f"u{user},i{(user + k) % 30},{k}" for user in range(40) for k in range(6)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,timestamp", *log]))
    options = ("--data", "log.csv", "--epochs", 1, "--embedding-dim", 8, "--out", "runs")
    program("train_hstu", "--device", "cpu", *options)
    assert (tmp_path / "runs" / "metrics.json").exists()
    with pytest.raises(AssertionError, match="no program 'nope'; choose from .*train_hstu"):
        program("nope")


def test_import_needs_torch_alone():
    script = (
        "import sys, torch; before = set(sys.modules); import jagged_modules;"
        " print(*(set(sys.modules) - before))"
    )
    imported = {
        name.split(".")[0]
        for name in run(
            sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {script}"
        ).split()
    }
    assert "jagged_modules" in imported
    assert imported.isdisjoint(OPTIONAL | {"numpy", "matplotlib"})


GUIDES = ["hstu-gdpa", "linear-compression", "broadcast", "block-attention", "multihead-attention"]
WITH_TORCH_ALONE = {
    "README": ["README.md"],
    "others": [
        "docs/operators.md",
        "docs/serving.md",
        *(f"docs/guides/{name}.md" for name in GUIDES),
    ],
}


@slow_after(1, "pages", WITH_TORCH_ALONE.values(), ids=WITH_TORCH_ALONE)
def test_examples_are_short_and_run_with_torch_alone(pages):
    """One process for several pages: to import torch takes longer than an example."""
    # None: an import raises
    script = (
        f"import sys; sys.path.insert(0, '.'); sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
    )
    for page in pages:
        blocks = examples(page)
        assert blocks and all(len(block.splitlines()) <= 20 for block in blocks)
        example = "\n".join(blocks)
        script += f"exec(compile({example!r}, {page!r}, 'exec'), {{'__name__': '__main__'}})\n"
    run(sys.executable, "-c", script)


def test_documents_name_only_commands_of_the_makefile():
    targets = set(
        re.findall(
            r"^([\w-]+)(?: [\w -]+)?:",
            (ROOT / "Makefile").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )

    def named(document):
        return set(
            re.findall(
                r"\bmake ([a-z-]+)",
                " ".join(re.findall(r"`[^`]*`|^(?:    )?make .*", document, re.MULTILINE)),
            )
        )

    assert {"train", "test"} <= named(README) <= targets
    assert (
        {"train", "serve", "test"}
        <= named((ROOT / "docs" / "install.md").read_text(encoding="utf-8"))
        <= targets
    )


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile(workflow):
    text = workflow.read_text(encoding="utf-8")
    targets = set(
        re.findall(
            r"^([\w-]+)(?: [\w -]+)?:",
            (ROOT / "Makefile").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    called = set(re.findall(r"run: make ([\w-]+)", text)) | set(
        re.findall(r"[\w-]+", "".join(re.findall(r"target: \[(.*)\]", text)))
    )
    assert called and called <= targets


def test_continuous_integration_runs_the_tests():
    """The command that README.md gives for the tests is among those that every change must pass."""
    assert re.search(
        r"^make .*\btest\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_no_folder_named_kernels_becomes_a_package():
    """A top-level package of that name collides with a published one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_machine_paths_or_foreign_hosts():
    found = []
    for path in tracked_files():
        if path.suffix in {".png", ".svg", ".pt"}:
            continue
        text = path.read_text(encoding="utf-8")
        found += [
            f"{path.name}: {host}"
            for host in re.findall(r"https?://([\w.-]+)", text)
            if host not in (HOSTS | DATA_HOSTS if path.name == "datasets.py" else HOSTS)
        ]
        found += [
            f"{path.name}: {match}"
            for match in re.findall(r"(?<![\w.~])/(?:home|root|work|Users|opt)/\w+", text)
        ]
    assert found == []


def test_dtypes_of_the_documentation_are_those_that_functions_take():
    from jagged_modules.dtypes import dtype_table

    assert dtype_table().strip() in (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
