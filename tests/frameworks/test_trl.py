"""TRL's SFTTrainer, on top of the Trainer of transformers."""

from pathlib import Path

import pytest
import tiny_llama
import torch
from derived import fsdp_lines
from frameworks.accelerated import LAYER_CLASS, FsdpOnCpu, arguments, trained
from frameworks.changes import comm_failure
from oracle import owned_lines
from tiny_llama import EMBEDDING, FLOAT, LAYER, LAYERS, NORM, PARAMETERS, WIDTH
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerFast

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # transformers and TRL warn about each other's calls.
    pytest.mark.filterwarnings("ignore"),
]
PAGE = Path(__file__).parents[2] / "docs/frameworks/accelerate.md"
RANKS = 4
LONG = 8
UNITS = tiny_llama.units()
RANK = 4
# Each layer has two adapters of two matrices.
ADAPTERS = 2 * 2 * RANK * WIDTH * FLOAT
# Each step gathers the number of tokens, of counted tokens and of correct ones as integers, and
# the entropy as a float; the end gathers the loss.
METRICS = [f"outside - all_gather[world] {RANKS * LONG}"] * 4
METRICS += [f"outside - all_gather[world] {RANKS * FLOAT}"] * 2


class FsdpTrainer(FsdpOnCpu, trl.SFTTrainer):
    pass


def tokenizer():
    """Build a tokenizer of the words 0 to 127, so that nothing is downloaded."""
    unknown, end = "0", "1"
    vocabulary = {f"{word}": word for word in range(tiny_llama.VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=unknown, eos_token=end)


def fine_tuning(folder, *, lora=None):
    config = {"transformer_layer_cls_to_wrap": [LAYER_CLASS]}
    settings = arguments(trl.SFTConfig, folder, fsdp=True, fsdp_config=config)
    texts = datasets.Dataset.from_list([{"text": "2 3 4 5 6 7 8 9"}] * 64)
    return FsdpTrainer(
        tiny_llama.build(),
        settings,
        train_dataset=texts,
        processing_class=tokenizer(),
        peft_config=lora,
    )


def test_fine_tuning(comm_mode, fsdp_tree, tmp_path):
    trainer = fine_tuning(tmp_path)
    trained(comm_mode, trainer)
    sent = fsdp_lines(UNITS, axis="world", kept="lm_head+model.norm")
    clipping = f"optimizer - all_reduce[world] {PARAMETERS * FLOAT}"
    assert owned_lines(comm_mode) == sorted([*sent, clipping, *METRICS])
    assert not fsdp_tree(trainer.model).findings


def test_lora_gathers_the_head_by_hand(comm_mode, tmp_path):
    lora = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])
    trained(comm_mode, fine_tuning(tmp_path, lora=lora))
    root = "base_model.model"
    embedding = f"{root}.model.embed_tokens"
    expected = [
        f"forward {embedding} all_gather[world] {EMBEDDING}",
        # Backward does not need it, but prefetches its gather.
        f"backward {embedding} all_gather[world] {EMBEDDING}",
        # The root has only the last norm.
        f"forward . all_gather[world] {NORM}",
        f"forward {root}.lm_head all_gather[world] {EMBEDDING}",
        f"optimizer - all_reduce[world] {2 * 2 * LAYERS * FLOAT}",
    ]
    for layer in (f"{root}.model.layers.{number}" for number in range(LAYERS)):
        expected += [
            f"forward {layer} all_gather[world] {LAYER + ADAPTERS}",
            f"backward {layer} all_gather[world] {LAYER + ADAPTERS}",
            f"backward {layer} reduce_scatter[world] {ADAPTERS}",
        ]
    assert owned_lines(comm_mode) == sorted([*expected, *METRICS])
    (by_hand,) = [event for event in comm_mode.events if event.owner == f"{root}.lm_head"]
    assert (by_hand.source.value, by_hand.role) == ("dtensor", "parameters")


def without_gather_before_the_chunks(monkeypatch):
    """Revert TRL 6077: pass the head to the chunks as it is, possibly sharded."""
    monkeypatch.setattr(trl.trainer.utils, "DTensor", ())


def test_reverted_fix_is_invisible_without_adapters(comm_mode, monkeypatch, tmp_path):
    """The unit of the head is gathered from the forward of the last norm to its backward."""
    fixed = trained(comm_mode, fine_tuning(tmp_path))
    without_gather_before_the_chunks(monkeypatch)
    assert not comm_failure(fixed, trained(comm_mode, fine_tuning(tmp_path)))


def test_reverted_fix_is_an_error_with_adapters(monkeypatch, tmp_path):
    without_gather_before_the_chunks(monkeypatch)
    trainer = fine_tuning(tmp_path, lora=peft.LoraConfig(r=RANK))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        trainer.train()


def test_gather_in_each_chunk_is_reported(comm_mode, monkeypatch, tmp_path):
    def of():
        return trained(comm_mode, fine_tuning(tmp_path, lora=peft.LoraConfig(r=RANK)))

    loss = trl.trainer.utils._ChunkedLogProbFunction

    class GatheringChunks:
        @staticmethod
        def apply(hidden, head, bias, labels, *options):
            def chunk(hidden, labels):
                return loss.apply(hidden, head.full_tensor(), bias, labels, *options)

            chunks = zip(hidden.chunk(8), labels.chunk(8), strict=True)
            parts = [checkpoint(chunk, *tokens, use_reentrant=False) for tokens in chunks]
            return [
                None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)
            ]

    once = of()
    without_gather_before_the_chunks(monkeypatch)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", GatheringChunks)
    first = comm_failure(once, of())[0]
    assert first == "base_model.model.lm_head gathered 1 -> 8 times in forward, other units once"
    assert f"`{first}`" in PAGE.read_text()
