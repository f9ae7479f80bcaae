"""Small random encoders with a WordPiece tokenizer, saved as sentence-transformers saves encoders."""

from pathlib import Path

import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
KINDS = {
    "bert": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {
        "num_hidden_layers": 3,
        "global_attn_every_n_layers": 2,
        "local_attention": 6,
        "reference_compile": False,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
}


def word_pieces(words: int = 600, *, types: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's, trained on the licence; with `types`, it numbers the two texts of a pair."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=words, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train([str(ROOT / "LICENSE")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, model_input_names=inputs, **names)


def save_encoder(folder: Path, model_type: str = "bert", *, labels: int | None = None, **changes: object) -> Path:
    """Save an encoder as a Hugging Face folder, or a classifier with `labels` classes, and return the folder."""
    torch.manual_seed(0)
    tokenizer = word_pieces(types=model_type == "bert")
    config = CONFIG_MAPPING[model_type](**{**SIZES, **KINDS[model_type], "vocab_size": len(tokenizer), **changes})
    if labels is not None:
        config.num_labels = labels
    auto = AutoModel if labels is None else AutoModelForSequenceClassification
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def export_encoder(checkpoint: Path, *options: str) -> Path:
    """Export a checkpoint to a model folder beside it, and return the folder."""
    from sharp.exporter.cli import export

    folder = checkpoint.with_name(f"{checkpoint.name}-model")
    arguments = [str(checkpoint), "--norm", "softmax", "--cache", "none", "-o", str(folder), *options]
    result = CliRunner().invoke(export, arguments, prog_name="sharp-export")
    assert result.exit_code == 0, result.output
    return folder


def save_sentence_encoder(
    folder: Path, model_type: str = "bert", *, pooling: str = "mean", normalize: bool = True, **changes: object
) -> Path:
    """Save an encoder through sentence-transformers itself, and return the folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    plain = save_encoder(folder.with_name(f"{folder.name}-plain"), model_type, **changes)
    transformer = Transformer(str(plain), max_seq_length=128)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling)]
    SentenceTransformer(modules=[*modules, Normalize()] if normalize else modules, device="cpu").save(str(folder))
    return folder
