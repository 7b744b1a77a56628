from __future__ import annotations

from streamsync.demo.instructions import IGNORED, PROMPTS, batch, example, instructions
from streamsync.demo.tiny import ByteTokenizer


def test_the_set_ships_with_the_package_and_keeps_the_prompts_out() -> None:
    items = instructions()
    assert len(items) == 24
    assert not {item.question for item in items} & set(PROMPTS)
    assert len({item.question for item in items}) == len(items)


def test_only_the_answer_has_labels() -> None:
    tokenizer = ByteTokenizer()
    item = instructions()[0]
    ids, labels = example(item, tokenizer, 80)
    assert len(ids) == len(labels) == 80
    learnt = [token for token in labels if token != IGNORED]
    assert learnt == tokenizer.answer(item.answer)
    first = labels.index(learnt[0])
    assert ids[:first] == tokenizer.prompt(item.question)
    assert ids[first : first + len(learnt)] == learnt


def test_a_long_example_is_cut() -> None:
    ids, labels = example(instructions()[0], ByteTokenizer(), 10)
    assert len(ids) == len(labels) == 10


def test_ranks_of_one_step_share_no_example() -> None:
    seen = [index for rank in range(3) for index in batch(4, rank, 3, 2, 24)]
    assert len(seen) == len(set(seen)) == 6
    assert batch(100, 2, 3, 2, 24) == [i % 24 for i in (604, 605)]


def test_bytes_survive_the_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.answer("Ahoy!")) == "Ahoy!"
    assert tokenizer.decode([200, 65]) == "\\xc8A"
