"""The kernel that exchanges rows between the GPUs of a host.

An exchange is one launch, so that XLA cannot put another exchange between its steps. The first
`READERS` of its programs wait for rows that peers send, and take them out of this GPU's memory. All
others write: each makes a chunk of `BLOCK_ROWS` rows for one peer, writes it into that peer's
memory, raises the chunk's flag there, and ends. Writers never wait, and the few readers leave room
for kernels that other GPUs may be waiting for, such as NCCL's.

Flags hold the number of the exchange, the epoch, which each GPU counts in its own memory: a program
may be run again, in a loop or as a CUDA graph, and no flag is ever reset. There are two sets of
flags and rows, used in turn. A reader also waits until every peer has come to this exchange, and
so has read what the last one brought; the next exchange may overwrite that.

`HEADER` bytes at the start of each GPU's memory hold the flags. Their places are those of
`triax.compat.peer_memory`.
"""

import triton
import triton.language as tl

# Triton does not specialise on these arguments, so that a new size compiles nothing.
_SIZES = ["capacity", "num_tokens", "num_terms"]


@triton.jit
def _memory(peers_ptr, device, units, dtype: tl.constexpr, UNIT: tl.constexpr):
    """Returns a pointer into a device's memory, `units` of `UNIT` bytes from its start."""
    address = (tl.load(peers_ptr + device) + units).to(tl.int64) * UNIT
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _wait(flag, epoch, abort, MAY_BE_AHEAD: tl.constexpr = False):
    """Waits until a peer has raised a flag; stops the program with an error if one has died."""
    # Epochs wrap around. Most flags are not of every exchange: their last one may be so long ago
    # that a difference has any sign.
    while _is_early(tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch, MAY_BE_AHEAD):
        dead = tl.load(abort, volatile=True)
        if dead != 0:
            _stop(dead)


@triton.jit
def _is_early(ahead, MAY_BE_AHEAD: tl.constexpr):
    return ahead < 0 if MAY_BE_AHEAD else ahead != 0


@triton.jit
def _stop(why):
    """Ends the program, and all that the process does on this GPU, with an error."""
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, $1;", "=r,r", [why], tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=_SIZES)
def _exchange_rows_kernel(
    x_ptr,
    source_ptr,
    terms_ptr,
    weights_ptr,
    filled_ptr,
    received_ptr,
    row_of_ptr,
    peers_ptr,
    position_ptr,
    capacity,
    num_tokens,
    num_terms,
    rows_ptr,
    TERMS: tl.constexpr,
    SUMMED: tl.constexpr,
    WIDTH: tl.constexpr,
    DEVICES: tl.constexpr,
    READERS: tl.constexpr,
    UNIT: tl.constexpr,
    EPOCH: tl.constexpr,
    ABORT: tl.constexpr,
    ENDED: tl.constexpr,
    BUSY: tl.constexpr,
    COME: tl.constexpr,
    FLAGS: tl.constexpr,
    MOST_FLAGS: tl.constexpr,
    SPACING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    position = tl.load(position_ptr)
    here = _memory(peers_ptr, position, 0, tl.int32, UNIT)
    epoch = tl.load(here + EPOCH) + 1
    turn = epoch & 1
    # Units of memory before the rows of this turn.
    rows_at = 1 + turn * tl.load(peers_ptr + DEVICES)
    flags_at = FLAGS + turn * MOST_FLAGS
    chunks = tl.cdiv(capacity, BLOCK_ROWS)
    if program == 0:
        busy = tl.atomic_xchg(here + BUSY, 1)
        if busy != 0:  # another exchange runs at the same time, with the same memory
            _stop(busy)
        for device in range(DEVICES):
            come = _memory(peers_ptr, device, 0, tl.int32, UNIT) + COME + position * SPACING
            tl.atomic_xchg(come, epoch, sem="release", scope="sys")

    if program >= READERS:  # writes a chunk
        writer = program - READERS
        device = (position + 1 + writer % DEVICES) % DEVICES  # this GPU is its own last peer
        chunk = writer // DEVICES
        row = chunk * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = row < tl.load(filled_ptr + device)
        if chunk * BLOCK_ROWS < tl.load(filled_ptr + device):
            there = _memory(peers_ptr, device, rows_at, dtype, UNIT)
            if row_of_ptr is None:  # rows of this GPU for itself go straight to the result
                there = tl.multiple_of(tl.where(device == position, rows_ptr, there), 16)
            there += (position * capacity + row).to(tl.int64)[:, None] * WIDTH
            number = (device * capacity + row).to(tl.int64)
            source = number
            exists = inside
            if source_ptr is not None:
                source = tl.load(source_ptr + number, inside, other=-1).to(tl.int64)
                exists = source >= 0
            for start in range(0, WIDTH, BLOCK_WIDTH):
                column = (start + tl.arange(0, BLOCK_WIDTH))[None, :]
                mask = inside[:, None] & (column < WIDTH)
                if terms_ptr is None:
                    read = x_ptr + source[:, None] * WIDTH + column
                    x = tl.load(read, exists[:, None] & mask, other=0)
                else:
                    total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
                    for term in tl.static_range(TERMS):
                        index = tl.load(terms_ptr + number * TERMS + term, inside, other=-1)
                        some = (index >= 0) & (index < num_terms)
                        read = x_ptr + index.to(tl.int64)[:, None] * WIDTH + column
                        value = tl.load(read, some[:, None] & mask, other=0.0).to(tl.float32)
                        if weights_ptr is not None:
                            # The weight of a term that does not exist may be NaN.
                            at = weights_ptr + number * TERMS + term
                            weight = tl.load(at, some, other=0.0)
                            value *= weight.to(tl.float32)[:, None]
                        total += value
                    x = total.to(dtype)
                tl.store(there + column, x, mask)
            tl.debug_barrier()  # all threads of this program have written
            flag = _memory(peers_ptr, device, 0, tl.int32, UNIT) + flags_at
            tl.atomic_xchg(flag + position * chunks + chunk, epoch, sem="release", scope="sys")
    else:
        arrived = _memory(peers_ptr, position, rows_at, dtype, UNIT)
        if row_of_ptr is None:
            for at in range(program, chunks * (DEVICES - 1), READERS):
                sender = (position + 1 + at % (DEVICES - 1)) % DEVICES
                chunk = at // (DEVICES - 1)
                filled = tl.load(received_ptr + sender)
                if chunk * BLOCK_ROWS < filled:
                    _wait(here + flags_at + sender * chunks + chunk, epoch, here + ABORT)
                    row = chunk * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
                    base = (sender * capacity + row).to(tl.int64)[:, None] * WIDTH
                    for start in range(0, WIDTH, BLOCK_WIDTH):
                        column = (start + tl.arange(0, BLOCK_WIDTH))[None, :]
                        mask = (row < filled)[:, None] & (column < WIDTH)
                        tl.store(
                            rows_ptr + base + column, tl.load(arrived + base + column, mask), mask
                        )
        else:
            for at in range(program, tl.cdiv(num_tokens, BLOCK_TOKENS), READERS):
                token = at * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
                inside = token < num_tokens
                for sender in range(DEVICES):
                    # A sender fills its slot from the start: the tokens' rows lie close together.
                    first, last = tl.full([BLOCK_TOKENS], 1 << 30, tl.int32), token * 0 - 1
                    for slot in tl.static_range(SUMMED):
                        source = tl.load(row_of_ptr + token * SUMMED + slot, inside, other=-1)
                        exists = (source >= 0) & (source // capacity == sender)
                        chunk = source % capacity // BLOCK_ROWS
                        first = tl.where(exists, tl.minimum(first, chunk), first)
                        last = tl.where(exists, tl.maximum(last, chunk), last)
                    for chunk in range(tl.min(first, 0), tl.max(last, 0) + 1):
                        _wait(here + flags_at + sender * chunks + chunk, epoch, here + ABORT)
                for start in range(0, WIDTH, BLOCK_WIDTH):
                    column = (start + tl.arange(0, BLOCK_WIDTH))[None, :]
                    total = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
                    for slot in tl.static_range(SUMMED):
                        source = tl.load(row_of_ptr + token * SUMMED + slot, inside, other=-1)
                        read = arrived + source.to(tl.int64)[:, None] * WIDTH + column
                        mask = (source >= 0)[:, None] & (column < WIDTH)
                        total += tl.load(read, mask, other=0.0).to(tl.float32)
                    target = rows_ptr + token.to(tl.int64)[:, None] * WIDTH + column
                    tl.store(target, total.to(dtype), inside[:, None] & (column < WIDTH))
        if program == 0:
            for device in range(DEVICES):
                _wait(here + COME + device * SPACING, epoch, here + ABORT, MAY_BE_AHEAD=True)
    tl.debug_barrier()
    if tl.atomic_add(here + ENDED, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.atomic_xchg(here + ENDED, 0, sem="relaxed")
        tl.store(here + EPOCH, epoch)
        tl.atomic_xchg(here + BUSY, 0)
