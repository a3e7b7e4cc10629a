"""`quantkit calibrate` from files to a folder: what it gives and what it refuses."""

import io
import json
import os
import random
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from quantkit.calibration import calibration_set, loading
from quantkit.calibration.build import Vocabulary
from quantkit.progress import Silent

WORDS = [f"{a}{b}" for a in ("lis", "pri", "fun", "val", "tok", "mod") for b in "aeioug"]
SMALL = ["--samples", "16", "--length", "64", "--quiet"]
FILES = ["calibration.json", "samples.parquet", "tokens.safetensors"]


def said(rng, low, high):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def chats(n, seed=0):
    rng = random.Random(seed)
    for _ in range(n):
        turns = [("user", said(rng, 3, 30)), ("assistant", said(rng, 3, 30))] * rng.randint(1, 2)
        yield {"messages": [{"role": role, "content": text} for role, text in turns]}


def texts(n, seed=1):
    rng = random.Random(seed)
    for _ in range(n):
        yield {"text": said(rng, 5, 40)}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chat_file(tmp_path):
    return write(tmp_path / "chats.jsonl", chats(120))


@pytest.fixture
def text_file(tmp_path):
    return write(tmp_path / "texts.jsonl", texts(120))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "set"


@pytest.fixture
def build(run_cli, out):
    """Build a small set; its manifest."""

    def run(*more, target=None):
        target = target or out
        result = run_cli(["calibrate", "build", "--model", "demo", "-o", target, *SMALL, *more])
        assert result.code == 0, result.stderr
        return json.loads((target / "calibration.json").read_text())

    return run


@pytest.fixture
def refused(run_cli, out):
    """Build what cannot be: one message, nothing on disk."""

    def run(*more, model="demo", code=3):
        result = run_cli(["calibrate", "build", "--model", model, "-o", out, *SMALL, *more])
        assert result.code == code, (result.stdout, result.stderr)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.count("quantkit: ") == 1
        assert not out.exists()
        assert not [path for path in out.parent.iterdir() if path.name.startswith(".set")]
        return result.stderr.split("quantkit: ")[1].rstrip()

    return run


def adds_up(manifest):
    for source in manifest["sources"]:
        rows = dict(source["rows"])
        if rows.pop("read") != sum(rows.values()):
            return False
    return True


def test_shipped_sets_are_listed(run_cli):
    result = run_cli(["calibrate", "list"])
    assert result.code == 0
    assert "python-docs" in result.stdout
    listed = json.loads(run_cli(["calibrate", "list", "--json"]).stdout)
    assert listed["python-docs"]["sources"][0]["kind"] == "python-docs"


def test_a_set_of_one_file(build, chat_file, out, run_cli):
    manifest = build("--from", chat_file)
    assert sorted(path.name for path in out.iterdir()) == FILES
    stored = load_file(out / "tokens.safetensors")
    assert tuple(stored["input_ids"].shape) == (16, 64)
    assert stored["lengths"].tolist() == [64] * 16
    assert manifest["n_tokens"] == 1024
    assert adds_up(manifest)
    assert manifest["sources"][0]["rows"]["read"] == 120
    samples = calibration_set.read(out).samples
    assert sum(piece["n_tokens"] for piece in samples) == 1024
    assert {piece["place"].split(":")[0] for piece in samples} == {"chats.jsonl"}
    shown = run_cli(["calibrate", "inspect", out])
    assert shown.code == 0
    assert "16 samples of 64 tokens, 1,024 in all, for demo" in shown.stdout
    assert "warning: 16 samples are few" in shown.stdout
    assert "128 to 512 are usual" in shown.stdout
    data = json.loads(run_cli(["calibrate", "inspect", out, "--json"]).stdout)
    assert data["digest"] == manifest["digest"]
    assert data["warnings"]


def test_a_warning_is_printed_once(run_cli, chat_file, out):
    built = run_cli(
        ["calibrate", "build", "--model", "demo", "-o", out, *SMALL, "--from", chat_file]
    )
    assert built.code == 0
    assert (built.stdout + built.stderr).count("16 samples are few") == 1
    headings = [line for line in built.stdout.splitlines() if "rows used" in line]
    assert len(headings) == 1
    assert "share of tokens" in headings[0]


def test_a_set_of_two_files_has_of_each_what_there_is(build, chat_file, text_file):
    manifest = build("--from", chat_file, "--from", text_file)
    assert [source["name"] for source in manifest["sources"]] == ["chats.jsonl", "texts.jsonl"]
    assert adds_up(manifest)
    for source in manifest["sources"]:
        assert abs(source["n_tokens"] / 1024 - source["share"]) <= 1 / 16


def test_weights_decide_on_shares(build, chat_file, text_file, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "sources:\n- {kind: files, path: chats.jsonl, weight: 3}\n"
        "- {kind: files, path: texts.jsonl, weight: 1, name: prose}\n"
    )
    manifest = build(path)
    assert [(s["name"], s["n_tokens"]) for s in manifest["sources"]] == [
        ("chats.jsonl", 768),
        ("prose", 256),
    ]


def test_a_source_too_small_for_a_sample_is_told_of(build, chat_file, tmp_path, run_cli, out):
    tiny = write(tmp_path / "tiny.jsonl", [{"text": "lisa pria"}])
    manifest = build("--from", chat_file, "--from", tiny)
    assert manifest["sources"][1]["n_tokens"] == 0
    shown = run_cli(["calibrate", "inspect", out]).stdout
    assert "warning: tiny.jsonl gives nothing: its share is less than a sample" in shown


def test_standard_input_gives_the_tokens_that_its_file_gives(
    build, text_file, tmp_path, monkeypatch
):
    stream = io.TextIOWrapper(io.BytesIO(text_file.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stream)
    piped = build("--from", "-")
    assert piped["sources"][0]["name"] == "stdin"
    assert piped["sources"][0]["rows"]["read"] == 120
    assert adds_up(piped)


def test_python_docs_keep_clear_of_their_own_task(build):
    manifest = build("python-docs", "--avoid", "python_docs")
    assert list(manifest["avoided"]) == ["python_docs"]
    assert manifest["sources"][0]["rows"]["contaminated"] > 0
    assert adds_up(manifest)


def test_padding_keeps_one_row_a_sample(build, chat_file, out):
    build("--from", chat_file, "--short", "pad")
    samples = calibration_set.read(out).samples
    assert [piece["sample"] for piece in samples] == list(range(16))
    lengths = load_file(out / "tokens.safetensors")["lengths"].tolist()
    assert lengths == [piece["n_tokens"] for piece in samples]


def test_two_processes_write_the_same_bytes_and_another_seed_others(
    build, chat_file, text_file, tmp_path
):
    data = ["--from", str(chat_file), "--from", str(text_file)]
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    build(*data, target=one)
    command = [sys.executable, "-m", "quantkit", "calibrate", "build", "--model", "demo"]
    for_hashes = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"
    subprocess.run(
        [*command, "-o", str(two), *SMALL, *data],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": for_hashes},
    )
    for name in FILES:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    build(*data, "--seed", "5", target=three)
    assert (three / FILES[2]).read_bytes() != (one / FILES[2]).read_bytes()


def test_a_set_calibrates_and_is_refused_with_another_tokenizer(
    build, chat_file, out, run_cli, tmp_path, tiny_model
):
    build("--from", chat_file)
    quantize = ["-r", "fp8-static", "--calibration", out, "--quiet", "-o"]
    result = run_cli(["quantize", "demo", *quantize, tmp_path / "q"])
    assert result.code == 0, result.stderr
    folder = tiny_model(vocab_size=4096)
    path = folder / "tokenizer.json"
    changed = json.loads(path.read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:-1]
    path.write_text(json.dumps(changed))
    result = run_cli(["quantize", folder, *quantize, tmp_path / "q2"])
    assert result.code == 3
    assert (
        f"{out} was made with the tokenizer of demo, which is not this model's; "
        "build it again with --model" in result.stderr
    )


@pytest.mark.parametrize("name", FILES[1:])
def test_a_set_with_changed_bytes_is_refused(build, chat_file, out, run_cli, name):
    build("--from", chat_file)
    raw = bytearray((out / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / name).write_bytes(raw)
    result = run_cli(["calibrate", "inspect", out])
    assert result.code == 3
    assert f"{out / name} does not match its digest in calibration.json" in result.stderr


def test_a_set_whose_digests_were_taken_away_is_refused(build, chat_file, out, run_cli):
    manifest = build("--from", chat_file)
    (out / "calibration.json").write_text(json.dumps(manifest | {"files": {}}))
    assert run_cli(["calibrate", "inspect", out]).code == 3


def test_inspecting_what_is_no_set(run_cli, tmp_path):
    result = run_cli(["calibrate", "inspect", tmp_path])
    assert result.code == 3
    assert result.stderr == (
        f"quantkit: {tmp_path} is not a calibration set: it has no calibration.json; "
        "`quantkit calibrate build` makes one\n"
    )


def test_inspecting_a_folder_that_is_not_there(run_cli, tmp_path):
    (tmp_path / "sets").mkdir()
    result = run_cli(["calibrate", "inspect", tmp_path / "set"])
    assert result.code == 3
    assert result.stderr == (
        f"quantkit: there is no folder {tmp_path}/set. Did you mean {tmp_path}/sets?\n"
    )


SECRETS = ["jane.doe.1234567890@private-mail.example.org", "198.51.100.77", "4111 1111 1111 1111"]


def test_arguments_that_are_nested_without_end_are_redacted_as_text(build, tmp_path):
    call = {"name": "f", "arguments": "[" * 100_000 + "joe@example.com" + "]" * 100_000}
    turns = [{"role": "user", "content": "Call it."}]
    turns += [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]
    path = write(tmp_path / "a.jsonl", [*chats(120), {"messages": turns}])
    assert build("--from", path, "--redact")["redacted"]["email"] == 1


def test_redaction_leaves_no_original_anywhere(build, tmp_path, out):
    rng = random.Random(0)
    rows = [
        {"text": f"{said(rng, 5, 20)} {rng.choice(SECRETS)} {said(rng, 5, 20)}"} for _ in range(120)
    ]
    # Rows that nobody can use are quoted in the account, and the quotation may be cut.
    rows.insert(3, {"unknown": "x" * 60 + SECRETS[0], "more": SECRETS[1]})
    rows.insert(9, {"messages": [{"role": SECRETS[0], "content": SECRETS[2]}]})
    manifest = build("--from", write(tmp_path / "a.jsonl", rows), "--redact", "--skip-bad")
    assert manifest["redacted"]["email"] > 0
    assert manifest["sources"][0]["rows"]["unrecognised"] == 2
    written = b"".join((out / name).read_bytes() for name in FILES)
    written += json.dumps(calibration_set.read(out).samples).encode()
    for part in ("jane.doe", "private-mail", "198.51.100", "4111 1111"):
        assert part.encode() not in written
    assert b"[EMAIL]" in written


def test_private_things_are_warned_of_where_nothing_replaces_them(run_cli, tmp_path, out):
    plain, private = list(chats(120)), list(chats(120))
    for row in private[:3]:
        row["messages"][0]["content"] += " Write to someone@example.com."
    for rows, warned in ((plain, False), (private, True)):
        path = write(tmp_path / "mine.jsonl", rows)
        command = ["calibrate", "build", "--from", path, "--model", "demo", "-o", out, "--force"]
        made = run_cli([*command, *SMALL[:4]])
        assert made.code == 0, made.stderr
        told = " ".join(made.stderr.split())
        assert ("e-mail addresses in 3); `quantkit calibrate build --redact`" in told) == warned


def test_rows_that_are_scored_on_are_left_out(build, chat_file, tmp_path):
    rows = list(chats(120))
    asked = [{"text": row["messages"][0]["content"]} for row in rows[:20]]
    asked = [row for row in asked if len(row["text"].split()) >= 13]
    avoid = write(tmp_path / "exam.jsonl", [*asked, {"text": ""}])
    manifest = build("--from", chat_file, "--avoid", avoid)
    assert manifest["sources"][0]["rows"]["contaminated"] == len(asked) > 3
    assert adds_up(manifest)


def test_a_typed_file_to_avoid_is_found_where_it_was_typed(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets").mkdir()
    rows = [*texts(119), {"text": " ".join(WORDS[:20])}]
    write(tmp_path / "sets" / "texts.jsonl", rows)
    (tmp_path / "sets" / "mine.yaml").write_text("sources: [{kind: files, path: texts.jsonl}]\n")
    write(tmp_path / "exam.jsonl", rows[-1:])
    manifest = build("sets/mine.yaml", "--avoid", "exam.jsonl")
    assert manifest["sources"][0]["rows"]["contaminated"] == 1


def test_json_of_a_build(run_cli, chat_file, out):
    command = ["calibrate", "build", "--model", "demo", "-o", out, "--from", chat_file]
    result = run_cli([*command, *SMALL, "--json"])
    assert result.code == 0
    assert json.loads(result.stdout)["n_samples"] == 16


def test_an_empty_file(refused, tmp_path):
    (tmp_path / "none.jsonl").touch()
    assert "none.jsonl is empty" in refused("--from", tmp_path / "none.jsonl")


def test_a_broken_line_is_named_or_counted(refused, build, tmp_path):
    lines = [json.dumps(row) for row in texts(120)]
    lines[49] = '{"text": "half'
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines) + "\n")
    message = refused("--from", path)
    assert f"{path}, line 50: " in message
    assert "--skip-bad" in message
    manifest = build("--from", path, "--skip-bad")
    assert manifest["sources"][0]["rows"]["unreadable"] == 1
    assert "broken.jsonl:50" in manifest["sources"][0]["examples"]["unreadable"]
    assert adds_up(manifest)


def test_mixed_encodings(refused, build, tmp_path):
    path = write(tmp_path / "mixed.jsonl", texts(120))
    path.write_bytes(path.read_bytes() + '{"text": "caf\xe9 lisa"}\n'.encode("latin-1"))
    message = refused("--from", path)
    assert "line 121" in message
    assert "not UTF-8 (0xe9)" in message
    assert build("--from", path, "--skip-bad")["sources"][0]["rows"]["unreadable"] == 1


def test_a_row_of_ten_megabytes(build, tmp_path):
    rng = random.Random(0)
    huge = {"text": " ".join([said(rng, 50, 50)] * 40_000)}
    manifest = build("--from", write(tmp_path / "huge.jsonl", [huge, *texts(120)]))
    assert manifest["sources"][0]["rows"]["read"] == 121
    assert adds_up(manifest)


def test_chats_without_an_answer_are_counted_and_told_of(run_cli, tmp_path, out):
    rows = [{"messages": row["messages"][:1]} for row in chats(200)]
    path = write(tmp_path / "asked.jsonl", rows)
    small = [word for word in SMALL if word != "--quiet"]
    result = run_cli(["calibrate", "build", "--model", "demo", "-o", out, "--from", path, *small])
    assert result.code == 0, result.stderr
    manifest = json.loads((out / "calibration.json").read_text())
    n = manifest["sources"][0]["remarks"]["without an answer"]
    assert n == 200 - manifest["sources"][0]["rows"].get("near-duplicate", 0)
    assert f"asked.jsonl: {n} rows end before an answer" in result.stderr
    whole = [piece for piece in calibration_set.read(out).samples if not piece["cut"]]
    assert all(piece["text"].rstrip().endswith("<|assistant|>") for piece in whole)


@pytest.fixture
def strict_model(tiny_model):
    folder = tiny_model(vocab_size=4096)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    return folder


def test_roles_that_the_template_refuses(refused, run_cli, strict_model, tmp_path, out):
    rows = list(chats(120))
    rows[4]["messages"].insert(0, {"role": "system", "content": "lisa"})
    path = write(tmp_path / "roles.jsonl", rows)
    message = refused("--from", path, model=strict_model)
    assert message.startswith(
        "roles.jsonl:5: the model's chat template refuses it (System role not supported)"
    )
    command = ["calibrate", "build", "--model", strict_model, "-o", out, "--from", path]
    assert run_cli([*command, *SMALL, "--skip-bad"]).code == 0
    manifest = json.loads((out / "calibration.json").read_text())
    assert manifest["sources"][0]["rows"]["refused by the template"] == 1
    assert adds_up(manifest)


def test_chats_for_a_model_without_a_template(refused, tiny_model, chat_file):
    folder = tiny_model(vocab_size=4096)
    (folder / "chat_template.jinja").unlink()
    message = refused("--from", chat_file, model=folder)
    assert message.startswith("chats.jsonl:1 is a chat and this model's tokenizer has no chat")


def test_a_model_without_a_tokenizer(refused, tiny_model, chat_file):
    folder = tiny_model(vocab_size=4096)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    message = refused("--from", chat_file, model=folder)
    assert message.startswith(f"cannot load the tokenizer of {folder}: ")


def test_fewer_rows_than_samples(refused, tmp_path):
    rows = [{"text": "lisa pria funo"}, {"text": ""}, {"text": "lisa pria funo"}]
    message = refused("--from", write(tmp_path / "few.jsonl", rows))
    assert "few.jsonl has " in message
    assert "1,024 for 16 samples of 64" in message
    assert "(3 rows read, 1 empty, 1 near-duplicate)" in message
    message = refused("--from", tmp_path / "few.jsonl", "--short", "pad")
    assert "few.jsonl has 1 usable rows" in message
    assert "16" in message


@pytest.mark.parametrize("weight", ["0", "-1", ".inf"])
def test_weights_that_sum_to_nothing(refused, tmp_path, weight):
    path = tmp_path / "mine.yaml"
    path.write_text(f"sources: [{{kind: files, path: a.jsonl, weight: {weight}}}]\n")
    assert "sources #1.weight" in refused(path)


def test_a_hub_that_cannot_be_reached(refused, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("sources: [{kind: hub, dataset: nobody/nothing-of-this-name}]\n")
    message = refused(path)
    assert "nobody/nothing-of-this-name" in message
    assert "HF_HUB_OFFLINE is set; connect once to fill the cache" in message


def test_an_existing_output_stays_unless_forced(build, run_cli, chat_file, out):
    before = build("--from", chat_file)
    command = ["calibrate", "build", "--model", "demo", "-o", out, "--from", chat_file, *SMALL]
    result = run_cli(command)
    assert result.code == 3
    assert result.stderr.startswith(f"quantkit: {out} ")
    assert "--force" in result.stderr
    assert json.loads((out / "calibration.json").read_text()) == before
    assert run_cli([*command, "--seed", "3", "--force"]).code == 0
    assert json.loads((out / "calibration.json").read_text())["spec"]["seed"] == 3


def test_an_unknown_set_shows_near_ones(refused):
    message = refused("python-doc")
    assert "unknown calibration set 'python-doc'. Did you mean python-docs?" in message


def test_a_set_or_data_but_one_of_them(refused, chat_file):
    assert refused(code=2) == "give a set's name, its YAML file, or --from with data of your own"
    both = refused("python-docs", "--from", chat_file, code=2)
    assert both == "give the set python-docs or --from with data of your own, not both"


def test_files_of_one_name_each_have_a_digest(build, tmp_path):
    for day, seed in (("monday", 1), ("tuesday", 2)):
        (tmp_path / day).mkdir()
        write(tmp_path / day / "log.jsonl", texts(80, seed))
    manifest = build("--from", str(tmp_path / "*day" / "log.jsonl"))
    assert sorted(manifest["sources"][0]["files"]) == ["monday/log.jsonl", "tuesday/log.jsonl"]
    two = build(
        *("--from", tmp_path / "monday" / "log.jsonl"),
        *("--from", tmp_path / "tuesday" / "log.jsonl"),
        target=tmp_path / "two",
    )
    assert len(two["sources"]) == 2


def test_tokens_alone_are_those_of_the_set_and_describe_nothing(build, text_file, monkeypatch):
    """A digest of a large vocabulary takes half a second, and a pass needs none."""
    kept = build("--from", text_file)
    digest = lambda tokenizer: pytest.fail("the tokenizer was digested")  # noqa: E731
    monkeypatch.setattr(calibration_set, "tokenizer_digest", digest)
    monkeypatch.setattr(calibration_set, "Tokenizer", digest)
    found = loading.load(str(text_file), Vocabulary.of("demo"), Silent(), 16, 64)
    assert found.digest == kept["digest"]
