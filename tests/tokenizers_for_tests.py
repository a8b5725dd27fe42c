"""Small tokenizers of every kind, trained on a few lines when first asked for."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from anydraft.vocabulary import Vocabulary

CORPUS = [
    "The steam engine turned heat into work, and work into wealth.",
    "A boiler makes steam; the steam drives a piston; the piston drives a wheel.",
    "def area(radius):\n    return 3.14159 * radius ** 2  # of a circle\n",
    "Les moteurs à vapeur ont changé le café, la forêt et l'été.",
    "Паровая машина изменила мир. 蒸汽机改变了世界。 증기 기관 😀 👍🏽",
    "x != y, x == z; isn't it? 12345 67890\n\n\tindented\n",
] * 4

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}"
    " [/INST]{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)


def special(text: str, **flags: Any) -> AddedToken:
    """A special token."""
    return AddedToken(text, special=True, normalized=False, **flags)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as Qwen's: no bos, <|im_end|>, and `<think>` added without being special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>")]
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )


@cache
def byte_level_with_prefix() -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts a space before a text (add_prefix_space), and lacks some bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    tokenizer.add_special_tokens([special("</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def _sentencepiece(kind: str, **options: Any) -> list[tuple[str, float, bool]]:
    """(piece, score, whether it is a byte token) of a SentencePiece model of the corpus."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        vocab_size=options.pop("vocab_size", 480),
        byte_fallback=True,
        character_coverage=0.98,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [
        (trained.id_to_piece(i), trained.get_score(i), trained.is_byte(i))
        for i in range(trained.get_piece_size())
    ]


@cache
def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """As Llama 2's: dummy prefix before every text, byte fallback, bos first."""
    pieces = _sentencepiece("bpe", normalization_rule_name="identity")
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _, is_byte in pieces[3:]
        if not is_byte
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_bos(tokenizer, chat_template=LLAMA2)


@cache
def unigram() -> PreTrainedTokenizerFast:
    """Unigram with byte fallback and a Metaspace before the first text only."""
    return _with_bos(_unigram("identity"), chat_template=None)


@cache
def unigram_nfkc() -> PreTrainedTokenizerFast:
    """The same with NFKC normalisation: the ids spell another text than the source."""
    tokenizer = _unigram("nfkc")
    tokenizer.normalizer = normalizers.NFKC()
    return _with_bos(tokenizer, chat_template=None)


def _unigram(rule: str) -> Tokenizer:
    pieces = _sentencepiece("unigram", normalization_rule_name=rule)
    tokenizer = Tokenizer(
        models.Unigram([(p, s) for p, s, _ in pieces], unk_id=0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


def _with_bos(tokenizer: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([special("<unk>"), special("<s>"), special("</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's: lower case, no spaces, no bytes."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")


@cache
def without_fallback() -> PreTrainedTokenizerFast:
    """A Unigram that writes <unk> for what it does not know."""
    pieces = [(p, s) for p, s, is_byte in _sentencepiece("unigram") if not is_byte]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_bos(tokenizer, chat_template=None)


@cache
def split_digits() -> PreTrainedTokenizerFast:
    """`byte_level`'s tokens with another way to split text."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[aeiou]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


MAKERS = {
    "byte_level": byte_level,
    "byte_level_with_prefix": byte_level_with_prefix,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
    "unigram_nfkc": unigram_nfkc,
    "wordpiece": wordpiece,
    "without_fallback": without_fallback,
    "split_digits": split_digits,
}


@cache
def vocabulary(kind: str, padding: int = 0) -> Vocabulary:
    """The Vocabulary of one of MAKERS, with logits wider by `padding`."""
    tokenizer = MAKERS[kind]()
    return Vocabulary.from_hf(tokenizer, len(tokenizer) + padding, name=kind)
