"""How many programs a launch has and how much scratch memory it takes, from `Shapes` and options alone."""

from dataclasses import dataclass

from sharp.plugins.triton.options import MOST_SPLITS, SPLIT_KEYS, Options
from sharp.plugins.triton.tiles import MOST_PROMPT_ROWS, Tile

DECODE_WAVES = 4  # programs per multiprocessor that decoding aims at; more of them share uneven lengths better
MOST_ROWS = 64  # of a sequence and a KV head that is decoded; tiles of so many and more are prefill's
MOST_TOKENS = 4  # of a sequence that is decoded; scratch memory grows with them
MOST_PARTS = 16  # of the keys of a prompt's tile
PART_KEYS = 4096  # fewest keys of a part, as far as the block table's room tells

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Shapes:
    """The sizes that grids and scratch memory follow from."""

    tokens: int
    sequences: int
    max_blocks: int
    q_heads: int
    kv_heads: int
    multiprocessors: int  # of the device
    new_keys: int = 0  # of a sequence; of Attention only

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


def row_blocks(options: Options, shapes: Shapes) -> int:
    """Decode tiles that a unit's rows of one KV head fill: its tokens times the query heads of the group."""
    return ceil(shapes.group * max(1, most_tokens(shapes)), options.rows)


def most_tokens(shapes: Shapes) -> int:
    """Most tokens of a sequence that decoding takes: as many as `MOST_ROWS` has room for, up to `MOST_TOKENS`.

    One where some sequence must have too many for decoding: then prefill takes the others of several tokens too, and
    scratch memory stays small. 0 where there are no more tokens than sequences, nearly always one each: then decoding
    takes every token by itself, so that nothing is left to prefill, whatever sequences they are of.
    """
    if shapes.tokens <= shapes.sequences:
        return 0
    room = max(1, min(MOST_TOKENS, MOST_ROWS // shapes.group))
    return room if shapes.tokens <= shapes.sequences * room else 1


def units(shapes: Shapes) -> int:
    """How many there are that decoding takes together: sequences, or tokens where `most_tokens` is 0."""
    return shapes.sequences if most_tokens(shapes) else shapes.tokens


def workers(options: Options, shapes: Shapes) -> int:
    """Programs for each tile of rows that decoding aims at; the keys of all sequences are split over them."""
    return ceil(DECODE_WAVES * shapes.multiprocessors, shapes.kv_heads * row_blocks(options, shapes))


def items(options: Options, shapes: Shapes) -> int:
    """Most splits of the keys of all units: as many as workers, as many units, and no more than their room has."""
    longest = max(1, min(ceil(shapes.max_blocks * options.block_size, SPLIT_KEYS), MOST_SPLITS))
    return min(workers(options, shapes) + max(0, units(shapes) - 1), units(shapes) * longest)


def prompts_needed(options: Options, shapes: Shapes) -> bool:
    """Whether a sequence may have more tokens than decoding takes."""
    longest = shapes.tokens // max(1, shapes.sequences) if options.contiguous else shapes.tokens
    return shapes.tokens > shapes.sequences > 0 and longest > most_tokens(shapes)


def prompt_parts(prompt: Options, shapes: Shapes) -> int:
    """Parts that the keys of a prompt's tiles are split into: more than one where the tiles are few.

    As few as they are where one sequence has all tokens that the others need not have.
    """
    if not prompts_needed(prompt, shapes):
        return 1
    alike = shapes.sequences if prompt.contiguous else 1
    tokens = shapes.tokens // alike if prompt.contiguous else shapes.tokens - shapes.sequences + 1
    programs = alike * ceil(tokens * shapes.group, prompt.rows) * shapes.kv_heads
    longest = ceil(shapes.max_blocks * prompt.block_size, PART_KEYS)
    return max(1, min(shapes.multiprocessors // programs, longest, MOST_PARTS))


def can_specialize(options: Options, tile: Tile, capability: int) -> bool:
    """Whether `specialized.py` has a kernel for prompts with these options and tiles."""
    return (
        capability == 90
        and options.normalizer in ("softmax", "ssa")
        and options.dtype == options.cache_dtype != "float32"
        and options.head_dim == options.value_dim in (64, 128)
        and options.scaled_late
        and (options.contiguous or options.block_size == tile.keys)
        and tile.rows == MOST_PROMPT_ROWS
    )


def is_specialized(prompt: Options, shapes: Shapes) -> bool:
    """Whether full tiles of prompts are visited before all others: a tile's rows must be of whole tokens."""
    return prompt.specialized and prompt_parts(prompt, shapes) == 1 and prompt.rows % shapes.group == 0


def scratch(options: Options, shapes: Shapes, prompt: Options) -> dict[str, int]:
    """Number of float32, in `plan` and `tiles` of int32, in each scratch buffer; the kernels say what they hold.

    `prompt` are the options of the kernel `prefill`, with the size of its tiles.
    """
    tokens = min(shapes.tokens, units(shapes) * max(1, most_tokens(shapes)))
    rows, keys = tokens * shapes.q_heads, shapes.max_blocks * options.block_size
    parts = items(options, shapes) * max(1, most_tokens(shapes)) * shapes.q_heads
    of_prompts = prompt_parts(prompt, shapes)
    kept = of_prompts > 1 or is_specialized(prompt, shapes)
    split = shapes.tokens * shapes.q_heads * of_prompts if kept else 0
    sizes = {
        "plan": 1 + units(shapes) + items(options, shapes),
        "sums": max(parts, split * options.sets_of_sums) * 8,
        "outputs": max(parts, split) * options.value_dim,
    }
    stored = rows if options.solves else 0
    sizes |= {"logits": stored * keys, "solution": stored * 3, "tiles": 0}
    if options.normalizer == "entmax":
        tiles = shapes.tokens * shapes.group // prompt.rows + shapes.sequences
        beside = 2 * of_prompts if of_prompts > 1 else 1
        sizes["tiles"] = shapes.kv_heads * tiles * (ceil(keys, prompt.listed_keys) + beside)
    return sizes


def ceil(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
