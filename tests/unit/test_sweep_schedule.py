"""Running graphs: nothing twice, only what changed again, faults kept to what they concern."""

import json

import pytest
import sweeps
from hypothesis import given
from hypothesis import strategies as st
from sweeps import Workers, line, step

from quantkit.errors import PolicyError, StorageError, SweepError
from quantkit.sweep.graph import Graph
from quantkit.sweep.lease import Lease
from quantkit.sweep.local import LocalExecutor
from quantkit.sweep.place import Place
from quantkit.sweep.result import load
from quantkit.sweep.schedule import Run


def texts(going) -> dict[str, str]:
    place = going.place
    return {
        r.title: place.read(f"results/{r.step}/{r.folder}/text").decode()
        for r in going.records.values()
    }


def test_everything_runs_once_and_recipes_share_a_pass(tmp_path):
    workers = Workers()
    going, notes = sweeps.run(line().values(), tmp_path, workers)
    assert sorted(workers.done) == sorted(line())
    assert ["one", "two"] in workers.jobs
    assert texts(going)["score one"] == "x(1(c))((1(c)))(s)"
    assert not going.errors
    assert len(notes.notes) == len(workers.jobs)


def test_what_is_there_is_not_run_again(tmp_path):
    sweeps.run(line().values(), tmp_path, Workers())
    workers = Workers()
    going, notes = sweeps.run(line().values(), tmp_path, workers)
    assert workers.jobs == []
    assert len(going.records) == 9
    assert notes.notes == ["9 of 9 steps are already done"]


def test_a_changed_recipe_reruns_only_what_depends_on_it(tmp_path):
    sweeps.run(line().values(), tmp_path, Workers())
    steps = line()
    two = step("quantize", "two", steps["set"], content="2 changed", together="quantize pass")
    verify = step("verify", "verify two", two)
    score = step("score", "score two", two, verify, steps["source"], content="x")
    report = step("report", "report", steps["source"], steps["score one"], score, whatever=True)
    kept = [s for t, s in steps.items() if t not in ("two", "verify two", "score two", "report")]
    workers = Workers()
    going, _ = sweeps.run([*kept, two, verify, score, report], tmp_path, workers)
    assert workers.done == ["two", "verify two", "score two", "report"]
    assert "2 changed" in texts(going)["report"]


def test_a_step_that_fails_twice_is_tried_a_third_time(tmp_path):
    workers = Workers(fail=lambda step, time: step.title == "verify one" and time < 3)
    going, notes = sweeps.run(line().values(), tmp_path, workers)
    assert not going.errors
    assert workers.times["verify one"] == 3
    told = [note for note in notes.notes if "failed" in note]
    assert told[0] == "verify verify one: attempt 1 of 3 failed: ValueError: verify one went wrong"
    logs = sorted(p.name for p in tmp_path.glob("logs/verify-verify-one-*/*.log"))
    assert logs == ["1.log", "2.log", "3.log"]


def test_what_would_end_the_same_way_is_not_tried_again(tmp_path):
    def fail(step, time):
        if step.title == "report":
            raise PolicyError("the policy does not fit")
        return False

    workers = Workers(fail)
    going, notes = sweeps.run(line().values(), tmp_path, workers)
    assert workers.times["report"] == 1
    assert going.errors == {line()["report"].name: "the policy does not fit"}
    assert "given up after 1 attempt: the policy does not fit" in notes.notes[-1]


def test_a_step_that_always_fails_is_reported_with_its_log_and_stops_nobody_else(tmp_path):
    workers = Workers(fail=lambda step, time: step.title == "verify one")
    steps = line()
    going, notes = sweeps.run(steps.values(), tmp_path, workers)
    assert workers.times["verify one"] == 3
    assert going.failed == [steps["verify one"].name]
    assert going.errors[steps["score one"].name] == ("needs verify verify one, which was given up")
    assert texts(going)["report"] == "(s)(x(2(c))((2(c)))(s))"  # with the other recipe's score
    log = tmp_path / "logs" / steps["verify one"].name / "3.log"
    assert "Traceback" in log.read_text()
    assert any(str(log) in note for note in notes.notes)
    state = json.loads((tmp_path / "state.json").read_text())
    assert set(state["errors"]) == {steps["verify one"].name, steps["score one"].name}


def test_what_was_given_up_is_tried_again_by_the_next_run(tmp_path):
    sweeps.run(line().values(), tmp_path, Workers(fail=lambda s, time: s.title == "verify one"))
    workers = Workers()
    going, _ = sweeps.run(line().values(), tmp_path, workers)
    assert workers.done == ["verify one", "score one", "report"]
    assert "x(1(c))" in texts(going)["report"]
    log = (tmp_path / "logs" / line()["verify one"].name / "1.log").read_text()
    assert "verify one went wrong" in log  # of the run before
    assert log.endswith("done\n")


def test_one_recipe_does_not_spoil_a_shared_pass(tmp_path):
    workers = Workers(fail=lambda step, time: step.title == "one")
    going, _ = sweeps.run(line().values(), tmp_path, workers)
    assert ["one", "two"] in workers.jobs
    assert ["two"] in workers.jobs
    assert going.failed == [line()["one"].name]
    assert line()["score two"].name in going.records


def tamper_file(place, record):
    path = place.local / f"results/{record.step}/{record.folder}/text"
    path.write_text("X" * len(path.read_text()))


def tamper_size(place, record):
    path = place.local / f"results/{record.step}/{record.folder}/text"
    path.write_text(path.read_text() + "more")


def tamper_missing(place, record):
    (place.local / f"results/{record.step}/{record.folder}/text").unlink()


def tamper_record(place, record):
    path = place.local / f"results/{record.step}/step.json"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 1'))


@pytest.mark.parametrize("change", [tamper_file, tamper_size, tamper_missing, tamper_record])
def test_a_result_that_was_tampered_with_is_found_and_made_again(tmp_path, change):
    before, _ = sweeps.run(line().values(), tmp_path, Workers())
    name, wanted = line()["two"].name, texts(before)
    change(Place(tmp_path), before.records[name])
    workers = Workers()
    going, notes = sweeps.run(line().values(), tmp_path, workers)
    assert workers.done == ["two"]  # the same came out, so nothing else had to be made
    assert notes.notes[0].startswith("made again: ")
    assert name in notes.notes[0]
    assert texts(going) == wanted


def test_a_large_result_is_checked_when_it_is_used(tmp_path, monkeypatch):
    from quantkit.sweep import result

    before, _ = sweeps.run(line().values(), tmp_path, Workers())
    wanted = texts(before)
    tamper_file(before.place, before.records[line()["two"].name])
    result.forget(before.place, line()["verify two"].name)
    faults = result.faults
    # As if the file were too large to read at the start.
    monkeypatch.setattr(
        "quantkit.sweep.result.faults",
        lambda place, record, largest=0: faults(place, record, largest),
    )
    workers = Workers()
    going, notes = sweeps.run(line().values(), tmp_path, workers)
    assert workers.done == ["verify two", "two", "verify two"]
    assert any("its digest differs" in note for note in notes.notes)
    assert texts(going) == wanted


def test_a_tampered_result_that_several_find_at_once_costs_none_of_them_an_attempt(
    tmp_path, monkeypatch
):
    from quantkit.sweep import result

    before, _ = sweeps.run(line().values(), tmp_path, Workers())
    wanted = texts(before)
    tamper_file(before.place, before.records[line()["source"].name])
    scores = ("score one", "score two")
    for title in scores:
        result.forget(before.place, line()[title].name)
    faults = result.faults
    # As if the file were too large to read at the start.
    monkeypatch.setattr(
        "quantkit.sweep.result.faults",
        lambda place, record, largest=0: faults(place, record, largest),
    )
    workers = Workers()
    going, notes = sweeps.run(line().values(), tmp_path, workers, side_by_side=True)
    assert not going.errors
    assert texts(going) == wanted
    assert workers.times == {"score one": 2, "score two": 2, "source": 1}
    assert not [note for note in notes.notes if "failed" in note]
    assert set(going.tries) == {line()["source"].name}


def test_other_results_of_what_is_needed_make_a_step_run_again(tmp_path):
    before, _ = sweeps.run(line().values(), tmp_path, Workers())
    name = line()["set"].name
    record = load(before.place, name)
    changed = record.model_copy(update={"identity": "another"}).sealed()
    before.place.write(f"results/{name}/step.json", changed.model_dump_json().encode())
    workers = Workers()
    sweeps.run(line().values(), tmp_path, workers)
    assert {"one", "two"} <= set(workers.done)
    assert "source" not in workers.done


def test_a_second_driver_is_refused(tmp_path):
    with Lease(Place(tmp_path)), pytest.raises(StorageError, match="belongs to another driver"):
        sweeps.run(line().values(), tmp_path, Workers())


def test_a_driver_that_lost_its_lease_stops(tmp_path):
    steps = line()

    def take_over(step, time):
        if step.title == "set":
            place = Place(tmp_path)
            place.write("lease/000009.json", place.read("lease/000001.json"))
            lease.renew()
        return False

    place, workers = Place(tmp_path), Workers(fail=take_over)
    with Lease(place) as lease:
        notes = sweeps.Notes()
        going = Run(
            Graph.of(steps.values()),
            place,
            LocalExecutor(notes, workers.functions),
            3,
            notes,
            lease,
        )
        with pytest.raises(StorageError, match="taken over by another driver"):
            going.go()
    assert "report" not in workers.done


def test_a_driver_that_lost_its_lease_in_the_last_step_touches_nothing_more(tmp_path):
    place, notes = Place(tmp_path), sweeps.Notes()

    def take_over(step, time):
        if step.title == "report":
            place.write("lease/000009.json", place.read("lease/000001.json"))
            place.write("state.json", b"of the other driver")
            lease.renew()
        return False

    functions = Workers(fail=take_over).functions
    with Lease(place) as lease:
        going = Run(
            Graph.of(line().values()), place, LocalExecutor(notes, functions), 3, notes, lease
        )
        with pytest.raises(StorageError, match="taken over by another driver"):
            going.go()
    assert place.read("state.json") == b"of the other driver"


def test_steps_that_need_each_other_are_refused():
    from dataclasses import replace

    one = step("verify", "one")
    two = step("verify", "two", one)
    with pytest.raises(SweepError, match=r"in a circle: verify-one-.* needs verify-two-"):
        Graph.of([replace(one, needs=(two.name,)), two])


def test_a_step_that_is_not_there_is_refused():
    two = step("verify", "two", step("verify", "one"))
    with pytest.raises(SweepError, match=r"needs verify-one-.*, which is not a step"):
        Graph.of([two])


@given(st.data())
def test_any_graph_runs_each_step_once_after_what_it_needs(tmp_path_factory, data):
    made = []
    for number in range(data.draw(st.integers(1, 12))):
        before = st.lists(st.integers(0, number - 1), unique=True, max_size=3)
        needs = data.draw(before) if number else []
        made.append(step("verify", str(number), *(made[n] for n in needs)))
    order = data.draw(st.permutations(made))
    workers = Workers()
    going, _ = sweeps.run(order, tmp_path_factory.mktemp("graph"), workers)
    assert sorted(workers.done) == sorted(s.title for s in made)
    places = {title: place for place, title in enumerate(workers.done)}
    titles = {s.name: s.title for s in made}
    for one in made:
        assert all(places[titles[n]] < places[one.title] for n in one.needs)
    assert not going.errors


def test_models_wait_for_those_before_them(tmp_path):
    first = step("verify", "first", content="1")
    later = step("verify", "later", content="2", after=(first.name,))
    workers = Workers(fail=lambda s, time: s.title == "first")
    going, _ = sweeps.run([later, first], tmp_path, workers)
    assert workers.done == ["first", "first", "first", "later"]  # and it goes on though that failed
    assert going.failed == [first.name]


@pytest.mark.parametrize("address", ["memory://sweeps/one"])
def test_the_same_on_storage_that_is_no_disk(address):
    workers = Workers()
    going, _ = sweeps.run(line().values(), address, workers)
    assert len(going.records) == 9
    again = Workers()
    sweeps.run(line().values(), address, again)
    assert again.jobs == []
    place = Place(address)
    record = going.records[line()["one"].name]
    place.write(f"results/{record.step}/{record.folder}/text", b"2(c)")
    sweeps.run(line().values(), address, again)
    assert again.done == ["one"]
    assert place.read(f"logs/{record.step}/1.log").decode().endswith("done\n")


def test_what_killed_attempts_left_is_tidied_away(tmp_path):
    from quantkit.sweep import result

    going, _ = sweeps.run(line().values(), tmp_path, Workers())
    record = going.records[line()["one"].name]
    left = tmp_path / "results" / record.step / "half-of-it"
    left.mkdir()
    (left / "text").write_text("1(")
    result.tidy(going.place, record)
    assert not left.exists()
    assert result.faults(going.place, record) == []


def test_of_two_that_publish_the_same_step_at_once_the_first_counts(tmp_path):
    from quantkit.sweep import result
    from quantkit.sweep.result import Circumstances, Product, publish

    one, how = step("verify", "one", content="1"), Circumstances(1.0, 1, "here", "now")

    def product(name: str) -> Product:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "text").write_text(name)
        return Product(folder, "the same", {})

    class Late(Place):
        """Another worker is done just before this one writes its record."""

        def create(self, name, content):
            self.first = publish(Place(tmp_path / "runs"), one, product("fast"), {}, how)
            return super().create(name, content)

    late = Late(tmp_path / "runs")
    kept = publish(late, one, product("slow"), {}, how)
    assert kept == late.first == load(late, one.name)
    result.tidy(late, kept)
    assert result.faults(late, kept, largest=None) == []
    assert late.names(f"results/{one.name}") == sorted([kept.folder, "step.json"])


def test_tidying_spares_the_result_that_counts(tmp_path):
    from quantkit.sweep import result

    going, _ = sweeps.run(line().values(), tmp_path, Workers())
    record = going.records[line()["one"].name]
    folder = tmp_path / "results" / record.step
    (folder / record.folder).rename(folder / "newer")
    newer = record.model_copy(update={"folder": "newer"}).sealed()
    (folder / "step.json").write_text(newer.model_dump_json())
    result.tidy(going.place, record)
    assert result.faults(going.place, newer) == []


def test_a_file_that_vanished_from_a_bucket_is_made_again(monkeypatch):
    from quantkit.sweep import result

    address = "memory://sweeps/vanished"
    before, _ = sweeps.run(line().values(), address, Workers())
    record, wanted = before.records[line()["two"].name], texts(before)
    result.forget(before.place, line()["verify two"].name)
    look = result.load_all

    def then_vanish(place, steps):
        found = look(place, steps)
        monkeypatch.setattr(result, "faults", lambda *_: [])  # it is there when it is looked at ...
        before.place.remove(f"results/{record.step}/{record.folder}/text")  # ... and no more
        return found

    monkeypatch.setattr(result, "load_all", then_vanish)
    workers = Workers()
    going, notes = sweeps.run(line().values(), address, workers)
    assert workers.done == ["verify two", "two", "verify two"]
    assert any(note.startswith("made again: ") and "is missing" in note for note in notes.notes)
    assert texts(going) == wanted
