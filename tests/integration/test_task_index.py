"""lm-eval's tasks from few of its files: the same as from all of them."""

import random

import pytest
from lm_eval.tasks import manager

from quantkit.scoring import lmeval, task_index, task_names

FILES = {
    "birds/owl.yaml": "task: owl\ntag: [night, birds]\ndataset_path: x\n",
    "birds/lark.yaml": "include: _day\ntask: lark\n",
    "birds/_day": "tag: day\ndataset_path: x\n",
    "cats/cat.yaml": "task: cat\ntag: night\ndataset_path: x\n",
    "cats/all.yaml": "group: pets\ntask:\n- cat\n- group: more\n  task: [dog]\n- task: wolf\n",
    "dogs/dog.yaml": "include: ../birds/_day\ntask: dog\n",
    "dogs/owl.yaml": "task: owl\ndataset_path: y\n",
    "dogs/wolf.yaml": "task: wolf\ntag: wild\ndataset_path: x\n",
    "zoo/zoo.yaml": "group: zoo\ntask: [pets, day, owl, nowhere]\n",
    "zoo/words.yaml": "task: words\ndescription: owl and cat and dog\ndataset_path: x\n",
    "far/away.yaml": "task: far\ndataset_path: x\n",
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A small lm-eval: tags from anywhere and from templates, nested groups, a name twice."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "manager.py"))
    monkeypatch.setattr(task_names, "definitions", lambda: tmp_path.resolve())
    yield tmp_path
    forget()


def forget():
    for kept in (task_index.reaching, task_index.all_tasks, task_names._texts):
        kept.cache_clear()


def same(name):
    """What is reached from one name is in both, to the last setting."""
    some, every = task_index.reaching((name,), ()), task_index.all_tasks(())
    reached = task_index._reached([name], every.task_index)
    for inside in reached & every.task_index.keys():
        assert some.task_index[inside] == every.task_index[inside], inside
    return reached, some


@pytest.mark.parametrize("name", ["owl", "lark", "cat", "pets", "zoo", "night", "day", "wild"])
def test_a_name_leads_to_what_it_leads_to_among_all(small, name):
    reached, some = same(name)
    assert "far" not in some.task_index
    if name == "zoo":
        assert reached == {
            "zoo",
            "pets",
            "cat",
            "dog",
            "more",
            "wolf",
            "day",
            "lark",
            "owl",
            "nowhere",
        }
    if name == "day":
        assert some.task_index["day"].tags == {"lark", "dog"}


def test_lm_eval_that_lists_its_files_otherwise_is_read_whole(small, monkeypatch):
    from lm_eval.tasks import _index

    monkeypatch.setattr(task_names, "places", lambda tasks: None)
    assert task_index.reaching(("owl",), ()) is task_index.all_tasks(())
    assert "far" in task_index.all_tasks(()).task_index
    assert _index.TaskIndex._iter_yaml_files(small)


def test_mmlu_is_found_in_its_own_files():
    forget()
    with lmeval.quiet():
        index = lmeval._manager(["mmlu"]).task_index
    folder = task_names.definitions() / "mmlu" / "default"
    subjects = {path.stem for path in folder.glob("mmlu_*.yaml")}
    assert len(subjects) > 50
    assert subjects <= task_index._reached(["mmlu"], index)
    assert "hellaswag" not in index


@pytest.mark.slow
def test_real_groups_and_tags_lead_to_the_same():
    forget()
    index = task_index.all_tasks(()).task_index
    kinds = sorted(name for name, entry in index.items() if entry.kind.name in ("GROUP", "TAG"))
    for name in (*random.Random(0).sample(kinds, 40), "bertaqa", "afrobench_lite", "leaderboard"):
        same(name)
