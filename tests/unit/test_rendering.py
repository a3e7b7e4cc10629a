"""Rows become the tokens that a serving engine would see: transformers' own, whatever the model."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.calibration import rendering
from quantkit.calibration.reading.row import Row
from quantkit.calibration.rendering import Refused, Renderer
from quantkit.errors import DataError

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["where", "what", "is", "the", "list", "of", "python", "return", "tool", "it", "no", "yes"]
BEGINS, ENDS = 0, 1

TEMPLATES = {
    "writes its own bos": (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "default system turn": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n"
        "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "strict about roles": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "marks generations": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINS_ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ': ' + c.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
)


def _trained():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return inner.to_str()


TRAINED = _trained()


def tokenizer_with(template=None, around="$A"):
    inner = Tokenizer.from_str(TRAINED)
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=around, special_tokens=[("<s>", BEGINS), ("</s>", ENDS)]
            ),
        ]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def text(n, rng):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def chat(*turns, tools=(), kind="chat"):
    messages = [{"role": role, "content": said} for role, said in turns]
    return Row("source", "rows.jsonl:1", kind, messages=messages, tools=tools)


def long_chat(n_turns, words, seed, system=None):
    rng = random.Random(seed)
    turns = [("system", system)] if system else []
    for number in range(n_turns):
        turns.append(("user", f"what {number} {text(words, rng)}"))
        turns.append(("assistant", text(words, rng)))
    return chat(*turns)


def rendered(tokenizer, row, length=512, seed=0, how="template"):
    return Renderer(tokenizer, length, how).pieces(row, random.Random(seed))


def theirs(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **more)


SHORT = [
    [("user", "where is it"), ("assistant", "no list")],
    [("user", "where is it"), ("assistant", "yes"), ("user", "what"), ("assistant", "  no ")],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", SHORT, ids=["one turn", "two turns"])
def test_chats_are_the_tokens_of_transformers(name, turns):
    tokenizer = tokenizer_with(TEMPLATES[name], "<s> $A </s>")
    (piece,) = rendered(tokenizer, row := chat(*turns))
    assert piece.ids.tolist() == theirs(tokenizer, row.messages)
    assert not piece.cut


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["chat", "instruction"])
def test_a_chat_that_ends_with_the_user_is_open_for_the_answer(name, kind):
    tokenizer = tokenizer_with(TEMPLATES[name])
    (piece,) = rendered(tokenizer, row := chat(("user", "where is it"), kind=kind))
    opened = theirs(tokenizer, row.messages, add_generation_prompt=True)
    assert piece.ids.tolist() == opened
    assert len(opened) > len(theirs(tokenizer, row.messages))


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
def test_a_template_that_writes_the_bos_writes_the_only_one(around):
    tokenizer = tokenizer_with(TEMPLATES["writes its own bos"], around)
    (piece,) = rendered(tokenizer, chat(*SHORT[0]))
    ids = piece.ids.tolist()
    assert ids[0] == BEGINS
    assert ids.count(BEGINS) == 1
    assert ids.count(ENDS) == 2  # one behind each turn


@pytest.mark.parametrize(
    ("around", "before", "after"),
    [("$A", [], []), ("<s> $A", [BEGINS], []), ("<s> $A </s>", [BEGINS], [ENDS])],
)
def test_text_has_the_special_tokens_of_the_tokenizer_once(around, before, after):
    tokenizer = tokenizer_with(TEMPLATES["writes its own bos"], around)
    (piece,) = rendered(tokenizer, Row("s", "a:1", "text", text="where is the list"))
    bare = tokenizer("where is the list", add_special_tokens=False)["input_ids"]
    assert piece.ids.tolist() == [*before, *bare, *after]
    assert piece.ids.tolist() == tokenizer("where is the list")["input_ids"]


def test_an_instruction_is_a_chat_for_models_with_a_template_and_text_for_others():
    row = chat(("user", "where is it"), ("assistant", "no list"), kind="instruction")
    templated = tokenizer_with(TEMPLATES["default system turn"])
    assert rendered(templated, row)[0].ids.tolist() == theirs(templated, row.messages)
    bare = tokenizer_with(None, "<s> $A")
    assert rendered(bare, row)[0].ids.tolist() == bare("where is it\n\nno list")["input_ids"]


def test_a_chat_without_a_template_is_refused_and_plain_is_the_way_out():
    bare, row = tokenizer_with(None, "<s> $A"), chat(*SHORT[0])
    with pytest.raises(DataError) as refused:
        rendered(bare, row)
    for told in ("rows.jsonl:1 ", "no chat template", "`chat: plain`"):
        assert told in str(refused.value)
    (piece,) = rendered(bare, row, how="plain")
    assert piece.ids.tolist() == bare("User: where is it\n\nAssistant: no list")["input_ids"]


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([("system", "be kind"), *SHORT[0]], "System role not supported"),
        ([("user", "a"), ("user", "b")], "Conversation roles must alternate"),
    ],
)
def test_what_a_template_refuses_is_told_with_its_own_words(turns, why):
    with pytest.raises(Refused) as refused:
        rendered(tokenizer_with(TEMPLATES["strict about roles"]), chat(*turns))
    roles = ", ".join(role for role, _ in turns)
    for told in (
        "rows.jsonl:1: ",
        f"({why})",
        f" {roles};",
        "`quantkit calibrate build --skip-bad`",
    ):
        assert told in str(refused.value)


def test_a_template_that_writes_nothing_gives_no_piece():
    assert rendered(tokenizer_with("{% if false %}x{% endif %}"), chat(*SHORT[0])) == []


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def tool_row(arguments):
    messages = [
        {"role": "user", "content": "what is the weather"},
        call(arguments),
        {"role": "tool", "content": "no", "tool_call_id": "1"},
        {"role": "assistant", "content": "no weather"},
    ]
    return Row("s", "rows.jsonl:1", "chat", messages=messages, tools=[TOOL])


@pytest.mark.parametrize("arguments", [{"city": "Bonn", "days": [1, 2]}, {}])
def test_arguments_of_calls_reach_the_template_as_objects(arguments):
    tokenizer = tokenizer_with(TOOLS)
    row = tool_row(json.dumps(arguments))
    (piece,) = rendered(tokenizer, row)
    as_objects = [row.messages[0], call(arguments), *row.messages[2:]]
    assert piece.ids.tolist() == theirs(tokenizer, as_objects, tools=[TOOL])
    assert f'"arguments": {json.dumps(arguments)}' in tokenizer.decode(piece.ids)
    # The row itself is left as it was.
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == json.dumps(arguments)


@pytest.mark.parametrize("arguments", ["not json", '["a", "list"]', "{broken", "12"])
def test_arguments_that_are_no_object_stay_the_text_they_are(arguments):
    tokenizer, row = tokenizer_with(TOOLS), tool_row(arguments)
    (piece,) = rendered(tokenizer, row)
    assert piece.ids.tolist() == theirs(tokenizer, row.messages, tools=[TOOL])


def test_no_arguments_at_all_are_an_empty_object():
    (piece,) = rendered(tokenizer := tokenizer_with(TOOLS), tool_row(""))
    assert '"arguments": {}' in tokenizer.decode(piece.ids)


def test_a_template_that_joins_arguments_to_text_gets_the_text():
    tokenizer, row = tokenizer_with(JOINS_ARGUMENTS), tool_row('{"city": "Bonn"}')
    (piece,) = rendered(tokenizer, row)
    assert piece.ids.tolist() == theirs(tokenizer, row.messages)


def test_windows_of_a_long_text_hold_all_of_its_tokens_once():
    for around, n_before, n_after in (("$A", 0, 0), ("<s> $A", 1, 0), ("<s> $A </s>", 1, 1)):
        tokenizer = tokenizer_with(None, around)
        for seed in range(20):
            said = text(200, random.Random(seed))
            pieces = rendered(tokenizer, Row("s", "a:1", "text", text=said), 64, seed)
            assert 1 < len(pieces) <= rendering.MAX_WINDOWS
            assert all(piece.cut and len(piece.ids) <= 64 for piece in pieces)
            parts = [piece.ids.tolist() for piece in pieces]
            assert all(part[:n_before] == [BEGINS] * n_before for part in parts)
            inner = [token for part in parts for token in part[n_before:]]
            assert inner == tokenizer(said)["input_ids"][n_before:]
            assert inner.count(ENDS) == n_after  # at the end of the text alone


def test_texts_that_are_encoded_ahead_become_the_same_pieces():
    texts = ["where is the list " * n for n in (1, 3, 40, 3, 200)]
    rows = [Row("s", "a:1", "text", text=said) for said in texts]
    plain, ahead = (Renderer(tokenizer_with(None, "<s> $A"), 32) for _ in range(2))
    ahead.encode_ahead(rows)
    ahead._tokenizer = None  # whoever encodes again is found out
    for row in rows:
        one, two = (r.pieces(row, random.Random(0)) for r in (plain, ahead))
        assert [piece.ids.tolist() for piece in one] == [piece.ids.tolist() for piece in two]


def test_edges_of_windows_lie_at_random_places():
    tokenizer, row = tokenizer_with(None), Row("s", "a:1", "text", text=text(200, random.Random(1)))
    firsts = {len(rendered(tokenizer, row, 64, seed)[0].ids) for seed in range(40)}
    assert len(firsts) > 15


def test_one_document_gives_no_more_windows_than_the_cap():
    tokenizer = tokenizer_with(None, "<s> $A </s>")
    row = Row("s", "a:1", "text", text=text(9000, random.Random(2)))
    for length in (16, 64):
        pieces = rendered(tokenizer, row, length)
        assert len(pieces) == rendering.MAX_WINDOWS
        assert all(len(piece.ids) <= length for piece in pieces)
        # Stretches out of the middle do not say that the text ends there.
        assert sum(piece.ids[-1] == ENDS for piece in pieces) <= 1


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_sample_of_hardly_any_tokens_is_never_exceeded(length):
    tokenizer = tokenizer_with(TEMPLATES["writes its own bos"], "<s> $A </s>")
    for row in (Row("s", "a:1", "text", text="where is the list"), chat(*SHORT[1])):
        pieces = rendered(tokenizer, row, length)
        assert pieces
        assert all(1 <= len(piece.ids) <= length for piece in pieces)


@pytest.mark.parametrize("system", [None, "be kind"])
@pytest.mark.parametrize(
    "name", ["writes its own bos", "default system turn", "strict about roles"]
)
def test_a_long_chat_begins_with_some_turn_of_the_user(name, system):
    if system and name == "strict about roles":
        pytest.skip("it takes no system turn")
    tokenizer, row = tokenizer_with(TEMPLATES[name]), long_chat(12, 8, 3, system)
    n_system = 1 if system else 0
    suffixes = {
        start: theirs(tokenizer, [*row.messages[:n_system], *row.messages[start:]])
        for start in range(n_system, len(row.messages), 2)
    }
    beginnings = set()
    for seed in range(8):
        (piece,) = rendered(tokenizer, row, 100, seed)
        assert piece.cut
        assert len(piece.ids) == 100
        fitting = [s for s, ids in suffixes.items() if ids[:100] == piece.ids.tolist()]
        assert len(fitting) == 1
        assert row.messages[fitting[0]]["role"] == "user"
        beginnings.update(fitting)
    assert len(beginnings) > 2
    assert rendered(tokenizer, row, 100, seed)[0].ids.tolist() == piece.ids.tolist()


def test_a_system_turn_in_the_middle_stays_there():
    tokenizer = tokenizer_with(TEMPLATES["default system turn"])
    rng = random.Random(0)
    turns = [("user", text(9, rng)), ("assistant", text(9, rng)), ("system", "be brief now")]
    row = chat(*turns, ("user", text(9, rng)), ("assistant", text(99, rng)))
    suffixes = {start: theirs(tokenizer, row.messages[start:])[:90] for start in (0, 3)}
    found = [rendered(tokenizer, row, 90, seed)[0].ids.tolist() for seed in range(10)]
    assert {start for start, ids in suffixes.items() if ids in found} == {0, 3}
    assert all(ids in suffixes.values() for ids in found)


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_long_opening_leaves_room_for_the_answer(role):
    tokenizer, rng = tokenizer_with(TEMPLATES["default system turn"]), random.Random(0)
    opening = [(role, text(500, rng))]
    opening += [("user", "where is it")] if role == "system" else []
    row = chat(*opening, ("assistant", "ANSWER " * 30))
    seen = set()
    for seed in range(10):
        (piece,) = rendered(tokenizer, row, 200, seed)
        assert len(piece.ids) <= 200
        said = tokenizer.decode(piece.ids)
        assert "ANSWER" in said
        seen.add(said)
    assert len(seen) > 5


def _many_turns():
    turns = ["what is it"] * 400_000
    return chat(*((("user", "assistant")[i % 2], said) for i, said in enumerate(turns)))


HUGE = {
    "text": lambda: Row("s", "a:1", "text", text="where is the list of it " * 420_000),
    "one word": lambda: Row("s", "a:1", "text", text="a" * 10_000_000),
    "a turn": lambda: chat(("user", "what is the list " * 600_000), ("assistant", "no " * 50)),
    "an answer": lambda: chat(("user", "what"), ("assistant", "no list " * 1_250_000)),
    "turns": _many_turns,
    "empty turns": lambda: chat(*((("user", "assistant")[i % 2], "") for i in range(100_000))),
    "arguments": lambda: tool_row(json.dumps({"file": "where is it " * 850_000})),
}


class Counting:
    """A tokenizer that knows how many characters and turns it was given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.n_seen = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **how):
        self.n_seen += len(text)
        return self._tokenizer(text, **how)

    def apply_chat_template(self, messages, **how):
        self.n_seen += sum(1 + len(str(message)) for message in messages)
        return self._tokenizer.apply_chat_template(messages, **how)


@pytest.mark.parametrize("what", HUGE)
def test_of_a_row_of_ten_megabytes_only_what_matters_is_encoded(what):
    tokenizer, row = Counting(tokenizer_with(TOOLS)), HUGE[what]()
    pieces = rendered(tokenizer, row, 256)
    assert tokenizer.n_seen < 500_000
    assert 1 <= len(pieces) <= rendering.MAX_WINDOWS
    assert all(1 <= len(piece.ids) <= 256 and piece.cut for piece in pieces)
    assert len(pieces[0].ids) > 20
