"""Prompts of a schema: gaps in positions, unions and filled slots equal one masked pass at the same positions."""

import json

import pytest
import torch

from kvwire.engines.transformers.masks import in_format
from kvwire.engines.transformers.plain import filled
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import LinkedPrompt, Module, Parameter, Schema, Union, fill_parameters, place_modules, read_schema

from ..engines.families import FAMILIES, SLIDES, engine_of, error_between, query, tokens

TOLERANCE = 1e-5
SEEN = 1e-3
SLOT = Parameter("days", 5, 4)
SCHEMA = Schema(
    (
        Module("system", tokens=12),
        Module("unused", tokens=9),
        Union((Module("rome", "cities/rome", 14), Module("oslo", "cities/oslo", 8))),
        Module("trip", tokens=13, start=44, parameters=(SLOT, Parameter("name", 10, 2))),
    )
)
TEXTS = {"system": tokens(12, 1), "unused": tokens(9, 2), "rome": tokens(14, 3), "oslo": tokens(8, 4),
         "trip": tokens(13, 5)}  # fmt: skip
ARGUMENT = tokens(3, 6)


def taken(*names, arguments=None):
    prompt = SCHEMA.prompt(names, arguments)
    return prompt, [TEXTS[name] for name in prompt.names]


def answered(engine, prompt, texts):
    """Logits of the question, after caches of the modules alone."""
    linked = place_modules([engine.prefill([ids])[0] for ids in texts], prompt)
    fill_parameters(engine, linked, prompt.fills)
    return engine.forward(engine.own_past(linked.cache), query(), prompt.tokens)


def masks_of(engine, visible, position):
    """One mask, or one for each kind of layer, windows by position."""
    windows = {spec.window for spec in engine.meta.layers if spec.kind != "none"}
    distance = position[:, None] - position
    made = {w: in_format(engine.model, visible & (w is None or distance < w)) for w in windows}
    if len(windows) == 1:
        return made[windows.pop()]
    sliding = next(window for window in windows if window is not None)
    return {"full_attention": made[None], "sliding_attention": made[sliding]}


@torch.no_grad()
def in_one_pass(engine, prompt, texts):
    """The naive twin: modules as they are alone, arguments, question, at their positions, in one pass under a mask."""
    ids, places, owners, shown = [], [], [], []
    for number, (start, text) in enumerate(zip(prompt.starts, texts, strict=True)):
        slots = [range(fill.at, fill.at + fill.tokens) for fill in prompt.fills if fill.document == number]
        ids += text
        places += range(start, start + len(text))
        owners += [number] * len(text)
        shown += [not any(at in slot for slot in slots) for at in range(len(text))]
    for fill in prompt.fills:
        start = prompt.starts[fill.document] + fill.at
        ids += fill.token_ids
        places += range(start, start + len(fill.token_ids))
        owners += [-1] * len(fill.token_ids)
        shown += [True] * len(fill.token_ids)
    ids += query()
    places += range(prompt.tokens, prompt.tokens + len(query()))
    owners += [-1] * len(query())
    shown += [True] * len(query())
    position, owner, seen = torch.tensor(places), torch.tensor(owners), torch.tensor(shown)
    alone = (owner[:, None] >= 0) & (owner[:, None] == owner)
    visible = (position <= position[:, None]) & (alone | ((owner[:, None] < 0) & seen))
    mask = masks_of(engine, visible, position)
    given = {"position_ids": position[None], "attention_mask": mask, "past_key_values": filled(())}
    return engine.model(input_ids=torch.tensor([ids]), **given).logits[0, -len(query()) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_gaps_equal_one_masked_pass_at_those_positions(family):
    engine = engine_of(family)
    prompt, texts = taken("trip", "oslo", "system")
    assert (prompt.names, prompt.starts, prompt.tokens) == (("system", "oslo", "trip"), (0, 21, 44), 57)
    found = answered(engine, prompt, texts)
    assert error_between(found, in_one_pass(engine, prompt, texts)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_filled_slots_equal_one_masked_pass(family):
    engine = engine_of(family)
    prompt, texts = taken("system", "rome", "trip", arguments={"trip.days": ARGUMENT, "trip.name": []})
    found = answered(engine, prompt, texts)
    assert error_between(found, in_one_pass(engine, prompt, texts)) < TOLERANCE
    plain, _ = taken("system", "rome", "trip")
    assert error_between(found, answered(engine, plain, texts)) > SEEN


def test_an_argument_as_long_as_its_slot_in_a_whole_prompt_is_exact_in_layers_with_windows():
    engine = engine_of("gemma3")
    schema = Schema((Module("system", tokens=12), Module("trip", tokens=13, parameters=(SLOT,))))
    prompt = schema.prompt(["system", "trip"], {"trip.days": tokens(4, 7)})
    caches = engine.prefill([TEXTS["system"], TEXTS["trip"]])
    linked = place_modules(caches, prompt)
    fill_parameters(engine, linked, prompt.fills)
    text = [*TEXTS["system"], *TEXTS["trip"][:5], *tokens(4, 7), *TEXTS["trip"][9:]]
    wanted = place_modules(caches, schema.prompt(["system", "trip"])).cache
    engine.update_rows(wanted, text, torch.arange(17, 21))
    assert all(torch.equal(a, b) for a, b in zip(linked.cache.keys, wanted.keys, strict=True))
    engine.forward(engine.own_past(linked.cache), query(), prompt.tokens)


@pytest.mark.parametrize("family", SLIDES)
def test_gaps_stay_gaps_token_by_token(family):
    """Windows move over gaps by position, whatever has been run already."""
    engine = engine_of(family)
    prompt, texts = taken("system", "trip", arguments={"trip.days": ARGUMENT})
    linked = place_modules([engine.prefill([ids])[0] for ids in texts], prompt)
    fill_parameters(engine, linked, prompt.fills)
    past, found = engine.own_past(linked.cache), []
    for at, token in enumerate(query()):
        found.append(engine.forward(past, [token], prompt.tokens + at)[-1])
    assert error_between(torch.stack(found), in_one_pass(engine, prompt, texts)) < TOLERANCE


def test_a_plain_cache_holds_no_gaps_where_layers_see_a_window():
    prompt, texts = taken("system", "trip")
    engine = engine_of("gemma3")
    linked = place_modules([engine.prefill([ids])[0] for ids in texts], prompt)
    with pytest.raises(MismatchError, match="pruned"):
        engine.past_key_values(linked.cache)


def test_members_of_a_union_start_at_the_same_position():
    starts = [SCHEMA.prompt([name]).starts for name in ("rome", "oslo")]
    assert starts == [(21,), (21,)]
    assert SCHEMA.prompt(["trip"]).starts == (44,)
    with pytest.raises(ArgumentError, match="rome and oslo are members of one union"):
        SCHEMA.prompt(["rome", "oslo"])


def test_what_an_argument_leaves_of_its_slot_holds_nothing():
    engine = engine_of("llama")
    prompt, texts = taken("trip", arguments={"trip.days": ARGUMENT})
    linked = place_modules(engine.prefill(texts), prompt)
    assert linked.cache.kept is not None  # positions 0 to 43 hold nothing
    fill_parameters(engine, linked, prompt.fills)
    mask = linked.cache.kept[0][0]
    assert mask.nonzero()[:, 0].tolist() == [*range(44, 52), *range(53, 57)]
    assert not linked.cache.keys[1][:, ~mask].any()


def test_documents_follow_each_other_without_holes_or_overlap():
    engine = engine_of("llama")
    caches = engine.prefill([TEXTS["system"], TEXTS["unused"]])
    assert place_modules(caches, SCHEMA.prompt(["system", "unused"])).cache.kept is None
    assert LinkedPrompt([3, 4], engine.meta).starts == (0, 3)
    for starts in ([0, 2], [0], [3, 0]):
        with pytest.raises(ArgumentError):
            LinkedPrompt([3, 4], engine.meta, starts=starts)


def test_lengths_have_to_be_known():
    schema = Schema((Module("a"), Module("b", tokens=3)))
    with pytest.raises(ArgumentError, match="length of 'a' is not known"):
        schema.prompt(["b"])
    assert schema.with_modules({"a": Module("a", tokens=7)}).prompt(["b"]).starts == (7,)


@pytest.mark.parametrize(
    ("names", "arguments", "words"),
    [
        (["nowhere"], {}, "no module 'nowhere'; it has system, unused, rome, oslo, trip"),
        ([], {}, "at least one module"),
        (["system", "system"], {}, "each once"),
        (["trip"], {"trip.days": [4] * 5}, "has 5 tokens, its slot 4; shorten it"),
        (["trip"], {"trip.weeks": [4]}, "no parameter 'trip.weeks'; they have trip.days, trip.name"),
        (["system"], {"trip.days": [4]}, "they have none"),
    ],
)
def test_what_a_schema_does_not_have(names, arguments, words):
    with pytest.raises(ArgumentError, match=words):
        SCHEMA.prompt(names, arguments)


def test_documents_that_do_not_fit_their_modules():
    engine = engine_of("llama")
    long, short = engine.prefill([tokens(15), tokens(7)])
    with pytest.raises(ArgumentError, match="'rome' has room for 14 tokens, its document has 15"):
        place_modules([long], SCHEMA.prompt(["rome"]))
    with pytest.raises(ArgumentError, match=r"slot trip.days ends at token 9 of a document of 7"):
        place_modules([short], SCHEMA.prompt(["trip"], {"trip.days": [4]}))
    with pytest.raises(ArgumentError, match="takes 1 modules, got 2"):
        place_modules([long, short], SCHEMA.prompt(["rome"]))
    shorter = place_modules([short], SCHEMA.prompt(["oslo"]))
    assert shorter.cache.tokens == 29
    assert shorter.cache.kept[0][0].sum() == 7


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (Module(""),),
        (Module("a", tokens=3), Module("a", tokens=3)),
        (Module("a", tokens=9), Module("b", tokens=3, start=8)),
        (Module("a", tokens=9, parameters=(Parameter("x", 2, 3), Parameter("y", 4, 2))),),
        (Module("a", tokens=9, parameters=(Parameter("x", 8, 3),)),),
        (Module("a", tokens=9, parameters=(Parameter("x", 1, 2), Parameter("x", 4, 2))),),
        (Module("a", tokens=9, parameters=(Parameter("x.y", 1, 2),)),),
        (Module("a", tokens=9, parameters=(Parameter("x"),)),),
        (Union(()),),
        (Union((Module("a", tokens=9, start=5),)),),
    ],
)
def test_impossible_schemas(parts):
    with pytest.raises(ArgumentError):
        Schema(parts)


def test_schemas_are_read_from_json():
    said = {
        "modules": [
            {"name": "system", "tokens": 12},
            {"name": "unused", "tokens": 9},
            {"union": [{"name": "rome", "document": "cities/rome", "tokens": 14},
                       {"name": "oslo", "document": "cities/oslo", "tokens": 8}]},
            {"name": "trip", "tokens": 13, "start": 44,
             "parameters": [{"name": "days", "at": 5, "tokens": 4}, {"name": "name", "at": 10, "tokens": 2}]},
        ]
    }  # fmt: skip
    assert read_schema(json.dumps(said)) == SCHEMA


@pytest.mark.parametrize(
    "data",
    [
        "", "[]", "{}", '{"modules": 3}', '{"modules": [3]}', '{"modules": [{"name": 3}]}', '{"parts": []}',
        '{"modules": [{"name": "a", "tokens": true}]}', '{"modules": [{"union": [{"name": "a", "start": 3}]}]}',
        '{"modules": [{"name": "a", "parameters": [{"name": "x", "at": "3"}]}]}',
    ],
)  # fmt: skip
def test_what_is_no_schema(data):
    with pytest.raises(ArgumentError):
        read_schema(data)
