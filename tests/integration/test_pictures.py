"""Chats with images: references are kept, a processor renders them, the model looks at them."""

import base64
import io
import json
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers
from tiny import READABLE, save_llama

import quantkit
from quantkit import resources
from quantkit.calibration import calibration_set
from quantkit.calibration.images import Unusable, Vision
from quantkit.model.blocks import Decoder
from quantkit.model.source import ModelSource
from quantkit.onepass import onepass
from quantkit.onepass.ranks import Ranks

TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4200, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": 64,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def tokenizer(**named):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(resources.DEMO_MODEL / "tokenizer.json"), pad_token="<|endoftext|>",
        eos_token="<|endoftext|>", additional_special_tokens=MARKS, **named,
    )  # fmt: skip


TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
LLAMA = {key: value for key, value in TEXT.items() if key != "sliding_window"}
LLAMA |= {"model_type": "llama"}


def llava(folder):
    """A tower of 16 tokens an image."""
    marked = tokenizer(
        extra_special_tokens={"image_token": MARKS[2]},
        chat_template=TEMPLATE.replace("IMAGE", MARKS[2]),
    )
    config = transformers.LlavaConfig(
        text_config=LLAMA, vision_config=TOWER | {"model_type": "clip_vision_model"},
        image_token_index=marked.convert_tokens_to_ids(MARKS[2]), image_seq_length=16,
    )  # fmt: skip
    save(transformers.LlavaForConditionalGeneration(config), folder)
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor = transformers.LlavaProcessor(
        images, marked, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, image_token=MARKS[2], chat_template=marked.chat_template,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


def idefics(folder):
    """Images of 40 x 24 are cut in four, 4 tokens each and as many for the whole."""
    words = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    words += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marked = tokenizer(chat_template=TEMPLATE.replace("IMAGE", words[0]))
    marked.add_special_tokens({"additional_special_tokens": words})
    config = transformers.Idefics3Config(
        text_config=LLAMA, vision_config=TOWER, scale_factor=2,
        image_token_id=marked.convert_tokens_to_ids(words[0]),
    )  # fmt: skip
    save(transformers.Idefics3ForConditionalGeneration(config), folder)
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    processor = transformers.Idefics3Processor(
        images, marked, image_seq_len=4, chat_template=marked.chat_template
    )
    processor.save_pretrained(folder)
    return folder


def gemma(folder):
    """A tower of 4 tokens an image, between which attention looks both ways."""
    marked = tokenizer(
        extra_special_tokens={
            "boi_token": MARKS[0], "eoi_token": MARKS[1], "image_token": MARKS[2]
        },
        chat_template=TEMPLATE.replace("IMAGE", MARKS[0]),
    )  # fmt: skip
    ids = marked.convert_tokens_to_ids(MARKS)
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=TOWER, mm_tokens_per_image=4,
        boi_token_index=ids[0], eoi_token_index=ids[1], image_token_index=ids[2],
    )  # fmt: skip
    save(transformers.Gemma3ForConditionalGeneration(config), folder)
    images = transformers.Gemma3ImageProcessorPil(
        size={"height": 32, "width": 32}, image_seq_length=4
    )
    processor = transformers.Gemma3Processor(
        images, marked, chat_template=marked.chat_template, image_seq_length=4
    )
    processor.save_pretrained(folder)
    return folder


def save(model, folder):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.to(torch.bfloat16).save_pretrained(folder)


def picture(number):
    Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    made = Image.new("RGB", (40, 24), (number * 40 % 256, 255 - number * 20, number * 90 % 256))
    made.putpixel((3, 3), (255, 255, 255))
    stream = io.BytesIO()
    made.save(stream, "PNG")
    return stream.getvalue()


def chats(folder, n=12, **more):
    """Half of them with an image: one as a path, one inside its address."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(n):
        words = f"Describe number {number}: " + " ".join(f"word{number * 7 + i}" for i in range(30))
        content = [{"type": "text", "text": words}]
        if number % 2:
            (folder / f"{number}.png").write_bytes(picture(number))
            address = f"{number}.png"
            if number % 4 == 1:
                coded = base64.b64encode(picture(number)).decode()
                address = f"data:image/png;base64,{coded}"
            content.insert(0, {"type": "image_url", "image_url": {"url": address}})
        answer = {"role": "assistant", "content": f"It is {number}, and that is all of it."}
        rows.append({"messages": [{"role": "user", "content": content}, answer]} | more)
    file = folder / "chats.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


BUILT = {"gemma": (gemma, 4), "llava": (llava, 16), "idefics": (idefics, 20)}
"""Families whose processors do without torchvision, and the tokens that stand for an image."""


@pytest.fixture(scope="module", params=["gemma"])
def model(request, tmp_path_factory):
    pytest.importorskip("PIL.Image", reason="pillow is not installed")
    torch.manual_seed(0)
    try:
        return BUILT[request.param][0](tmp_path_factory.mktemp(request.param) / "model")
    except ImportError as error:  # transformers 5.17 has no other Idefics 3
        pytest.skip(" ".join(str(error).split()))


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("set")
    file = chats(out / "data")
    found = quantkit.calibrate(file, model=model, samples=12, length=160, out=out / "set")
    return out / "set", found


every_processor = pytest.mark.parametrize("model", BUILT, indirect=True)


@every_processor
def test_a_set_keeps_images_and_the_tokens_that_stand_for_them(model, built, request):
    folder, _ = built
    n_each = BUILT[request.node.callspec.params["model"]][1]
    found = calibration_set.read(folder)
    tokens = found.tokens
    config = json.loads((model / "config.json").read_text())
    image_token = config.get("image_token_index", config.get("image_token_id"))
    for ids, pictures in zip(tokens.ids, tokens.pictures, strict=True):
        assert int((ids == image_token).sum()) == n_each * len(pictures)
    assert sum(map(len, tokens.pictures)) == 6
    assert len(list((folder / "images").iterdir())) == 6
    other = [*tokens.pictures[1:], tokens.pictures[0]]
    assert (
        tokens.digest != type(tokens)(tokens.name, tokens.ids, tokens.lengths, tuple(other)).digest
    )


@every_processor
def test_blocks_see_what_they_see_in_the_model_itself(model, built):
    tokens = calibration_set.read(built[0]).tokens
    source = ModelSource.open(str(model))
    decoder = Decoder.open(source, torch.device("cpu"))
    states, calls, _ = onepass._begin(decoder, tokens, Ranks())
    whole = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    inputs = onepass._images(source, tokens, tokens)
    place = next(n for n, some in enumerate(tokens.pictures) if some)
    hidden = states.batch(place)
    for index, call in enumerate(calls):
        with decoder.loaded(index, decoder.read(index)) as block:
            hidden = decoder.run(block, hidden, call.of_batch(place, 1, decoder.device))
    taken = ("pixel_values", "pixel_attention_mask", "token_type_ids")
    known = {name: value for name, value in inputs[place].items() if name in taken}
    with torch.no_grad():
        seen = whole(
            input_ids=tokens.ids[place : place + 1], output_hidden_states=True, **known
        ).hidden_states[-1]
        blind = whole(
            input_ids=tokens.ids[place : place + 1], output_hidden_states=True
        ).hidden_states[-1]
    (name,) = (n for n, _ in whole.named_modules() if re.fullmatch(r"model\.\w+_model\.norm", n))
    norm = decoder.model.get_submodule(name)
    norm.to_empty(device="cpu").load_state_dict(whole.get_submodule(name).state_dict())
    n = int(tokens.lengths[place])
    ours = norm(hidden)[0, :n]
    torch.testing.assert_close(ours, seen[0, :n], rtol=1e-3, atol=1e-3)
    assert (ours - blind[0, :n]).abs().max() > 0.05


@every_processor
def test_checkpoints_learn_from_images(model, built, tmp_path, run_cli):
    whole = calibration_set.read(built[0]).tokens
    text = replace(whole, pictures=())
    made = [
        quantkit.quantize(model, ["gptq-w4a16"], out=tmp_path / n, calibration=one, device="cpu")[0]
        for n, one in (
            ("images", built[0]),
            ("text", built[1].__class__(text, [], built[1].manifest)),
        )
    ]
    assert quantkit.verify(made[0], source=model).ok
    assert made[0].digest != made[1].digest
    refused = run_cli(
        ["quantize", model, "-r", "gptq-w4a16", "--calibration", built[0], "--length", "64",
         "-o", tmp_path / "out", "--device", "cpu"]
    )  # fmt: skip
    assert refused.code == 3
    assert "has images, which are not cut: leave out --length" in refused.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "https://example.org/a.png"}, "is not here; save it, and name its file"),
        ({"url": "gone.png"}, "cannot read the image gone.png: No such file or directory"),
        ({"url": "data:image/png;base64,????"}, "is not base64"),
    ],
)
def test_images_that_cannot_be_used_are_one_sentence(model, tmp_path, run_cli, change, words):
    file = chats(tmp_path / "data", 8)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["messages"][0]["content"][0]["image_url"] = change
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = ["calibrate", "build", file, "--model", model, "-o", tmp_path / "set"]
    asked += ["--samples", "6", "--length", "160"]
    refused = run_cli(asked)
    assert refused.code == 3
    assert "chats.jsonl:2: " in refused.stderr
    assert words in refused.stderr
    assert run_cli([*asked, "--skip-bad"]).code == 0


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_another_package_names_it(tmp_path):
    """As published folders of Qwen have it: its videos need torchvision."""
    tokenizer(chat_template=TEMPLATE).save_pretrained(tmp_path)
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    described = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    with pytest.raises(Unusable, match=r"it needs torchvision, .* pip install torchvision"):
        Vision.of(tmp_path)


def test_without_a_processor_chats_are_read_as_text(tmp_path, run_cli):
    folder = save_llama(tmp_path / "model", **READABLE)
    rows = [
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"{n}.png"}},
            {"type": "text", "text": " ".join(f"what{n} w{n}{i}" for i in range(9))},
        ]}, {"role": "assistant", "content": f"Number {n}, of course."}]}
        for n in range(12)
    ]  # fmt: skip
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = ["calibrate", "build", file, "--model", folder, "--samples", "2", "--length", "48"]
    made = run_cli([*asked, "-o", tmp_path / "set"])
    assert made.code == 0, made.stderr
    said = "12 chats are read without their images: the model has no processor for images"
    assert said in " ".join(made.stderr.split())
    redacted = run_cli([*asked, "-o", tmp_path / "redacted", "--redact"])
    assert "images cannot be" in " ".join(redacted.stderr.split())


MULTIMODAL = {
    "qwen2_5_vl": ("Qwen2_5_VL", "places of rows and columns in the rotation"),
    "qwen3_vl": ("Qwen3VL", "features that are added between blocks"),
}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_what_a_family_does_with_images_reaches_its_blocks(kind, tmp_path):
    """By itself, without a processor: patches as it would cut them, of 4 x 8."""
    start = MULTIMODAL[kind][0]
    text = {k: v for k, v in TEXT.items() if k != "sliding_window"} | {
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "patch_size": 8,
        "out_hidden_size": 128, "num_position_embeddings": 64, "window_size": 32,
        "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = getattr(transformers, f"{start}Config")(
        text_config=text, vision_config=vision, image_token_id=4100, video_token_id=4101,
        vision_start_token_id=4102, vision_end_token_id=4103,
    )  # fmt: skip
    family = getattr(transformers, f"{start}ForConditionalGeneration")
    torch.manual_seed(0)
    save(family(config), tmp_path)
    grid = torch.tensor([[1, 4, 8]])
    patches = torch.randn(32, 3 * 2 * 8 * 8)
    pictured = torch.tensor([[5, 6, 4102, *[4100] * 8, 4103, *range(10, 30)]])
    plain = torch.arange(40, 40 + pictured.shape[1])[None]
    inputs = [
        {"mm_token_type_ids": torch.zeros_like(plain)},
        {
            "pixel_values": patches,
            "image_grid_thw": grid,
            "mm_token_type_ids": (pictured == 4100).long(),
        },
    ]
    decoder = Decoder.open(ModelSource.open(str(tmp_path)), torch.device("cpu"))
    tokens = torch.cat([plain, pictured])
    hidden, calls = decoder.start(tokens, 8, None, inputs)
    whole = family.from_pretrained(tmp_path, dtype=torch.float32)
    for place, given in enumerate(inputs):
        states = hidden[place]
        for index, call in enumerate(calls):
            with decoder.loaded(index, decoder.read(index)) as block:
                states = decoder.run(block, states, call.of_batch(place, 1, decoder.device))
        with torch.no_grad():
            seen = whole(
                input_ids=tokens[place : place + 1], output_hidden_states=True, **given
            ).hidden_states[-1]
            ours = whole.model.language_model.norm(states)
        torch.testing.assert_close(ours, seen, rtol=1e-4, atol=1e-4)
