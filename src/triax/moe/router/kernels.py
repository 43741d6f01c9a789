"""The router's kernels: scores, choice and weights of some tokens in one program, and the gradient.

A row of logits becomes a row of integer keys. A key holds the order of a float in its upper
bits and the place in the row in its lower bits; earlier places are larger. So keys are unique,
the largest key is the first of the best logits, and the next is the largest key below it. If
order and place do not fit into 32 bits, the order's lowest bits are left out; if two chosen
logits differ only in these bits, the choice is made again from all bits.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_SMALLEST = tl.constexpr(-(2**31))
_MOST_UNROLLED = tl.constexpr(16)
_FLAT = tl.constexpr(-17.0)  # below it softplus is exp in float32


@triton.jit
def _order(values):
    """Maps float32 to int32 that compare as in `jax.lax.top_k`: NaN above infinity."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _widened(logits):
    """Returns float32. A NaN keeps its sign, which a GPU's conversion from float16 drops."""
    wide = logits.to(tl.float32)
    if logits.dtype == tl.float16:
        sign = logits.to(tl.int16, bitcast=True).to(tl.int32) & _SMALLEST
        wide = (wide.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def _value(order):
    """Returns the float32 of an order: the inverse of `_order`."""
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _choosable(values):
    """Makes all NaNs in computed scores positive, so that they rank as the greatest."""
    return tl.where(values == values, values, float("nan"))


@triton.jit
def _largest_below(keys, last):
    """Returns the largest key of each row below `last`, or the largest of all if none is below.

    Keys have at most 31 bits. Adding 2**31 - `last` makes keys below `last` positive, and others
    negative. That is one add and one maximum, for which Hopper has one instruction.
    """
    shift = tl.add(tl.full(last.shape, -(2**31), tl.int32), -last, sanitize_overflow=False)
    wrapped = tl.max(tl.add(keys, shift[:, None], sanitize_overflow=False), 1)
    return tl.add(wrapped, -shift, sanitize_overflow=False)


@triton.jit
def _follow(keys, best, BITS: tl.constexpr):
    """Returns the next best keys, and 1 where they differ from `best` only in the lowest BITS."""
    following = _largest_below(keys, best)
    return following, (((best ^ following) >> BITS) == 0).to(tl.int32)


@triton.jit
def _choose(
    order,
    place,
    eligible,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    MORE: tl.constexpr,
):
    """Returns the places of each row's TOP_K greatest orders, [rows, BLOCK_SLOTS], best first.

    Also returns whether two successive best keys differ only in place: then the BITS + 1 lowest
    bits of orders, which keys lack, could change the choice. MORE: more than TOP_K experts exist.
    """
    LAST: tl.constexpr = 2**BITS - 1
    slot = tl.arange(0, BLOCK_SLOTS)[None, :]
    # The filler is below all keys, but so near that its difference to any key fits in 32 bits.
    keys = tl.where(eligible, ((order >> (BITS + 1)) << BITS) | (LAST - place), -(2**30) - 1)
    best = tl.max(keys, 1)
    chosen = tl.zeros([order.shape[0], BLOCK_SLOTS], tl.int32)
    alike = tl.zeros([order.shape[0]], tl.int32)
    if TOP_K <= _MOST_UNROLLED:
        for k in tl.static_range(TOP_K):
            chosen = tl.where(slot == k, best[:, None], chosen)
            best, same = _follow(keys, best, BITS)
            alike |= same & (MORE or k + 1 < TOP_K)
    else:
        for k in range(TOP_K):
            chosen = tl.where(slot == k, best[:, None], chosen)
            best, same = _follow(keys, best, BITS)
            alike |= same & (MORE | (k + 1 < TOP_K))
    return LAST - (chosen & LAST), tl.max(alike, 0) != 0


@triton.jit
def _choose_by_all_bits(order, place, eligible, TOP_K: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """Chooses like `_choose`, in two steps: the greatest order, and the first place with it."""
    BLOCK: tl.constexpr = order.shape[1]
    slot = tl.arange(0, BLOCK_SLOTS)[None, :]
    chosen = tl.zeros([order.shape[0], BLOCK_SLOTS], tl.int32)
    left = tl.where(eligible, tl.maximum(order, _SMALLEST + 1), _SMALLEST)
    for k in range(TOP_K):
        greatest = tl.max(left, 1)[:, None]
        first = tl.min(tl.where(left == greatest, place, BLOCK), 1)[:, None]
        chosen = tl.where(slot == k, first, chosen)
        left = tl.where(place == first, _SMALLEST, left)
    return chosen


@triton.jit
def _two_best(first, second, other_first, other_second):
    """Returns the two greatest values of two pairs; each pair is in descending order."""
    second = tl.maximum(second, other_second)
    return tl.maximum(first, other_first), tl.maximum(tl.minimum(first, other_first), second)


@triton.jit
def _kept_groups(
    order,
    known,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Whether each place is in a chosen group; a group's score sums its GROUP_BEST best scores."""
    BLOCK_TOKENS: tl.constexpr = order.shape[0]
    left = tl.where(known, order, _SMALLEST)
    left = tl.reshape(left, [BLOCK_TOKENS, BLOCK_GROUPS, BLOCK_SIZE])
    if GROUP_BEST == 2:
        below_all = tl.full(left.shape, -(2**31), tl.int32)
        greatest, second = tl.reduce((left, below_all), 2, _two_best)
        total = _value(greatest) + _value(second)
    else:
        total = tl.zeros([BLOCK_TOKENS, BLOCK_GROUPS], tl.float32)
        missing = tl.full([BLOCK_TOKENS, BLOCK_GROUPS], GROUP_BEST, tl.int32)
        for _ in range(GROUP_BEST):
            best = tl.max(left, 2)
            equal = left == best[:, :, None]
            taken = tl.minimum(tl.sum(equal.to(tl.int32), 2), missing)
            total += tl.where(taken > 0, _value(best) * taken.to(tl.float32), 0.0)
            missing -= taken
            left = tl.where(equal, _SMALLEST, left)
    group = tl.broadcast_to(tl.arange(0, BLOCK_GROUPS)[None, :], [BLOCK_TOKENS, BLOCK_GROUPS])
    rank = tl.where(group < NUM_GROUPS, _order(_choosable(total)), _SMALLEST)
    kept = tl.zeros([BLOCK_TOKENS, BLOCK_GROUPS], tl.int32)
    for _ in range(TOP_GROUPS):
        best = tl.max(rank, 1)
        first = tl.min(tl.where(rank == best[:, None], group, BLOCK_GROUPS), 1)
        kept = tl.where(group == first[:, None], 1, kept)
        rank = tl.where(group == first[:, None], _SMALLEST, rank)
    kept = tl.broadcast_to(kept[:, :, None], [BLOCK_TOKENS, BLOCK_GROUPS, BLOCK_SIZE])
    return tl.reshape(kept, [BLOCK_TOKENS, BLOCK_GROUPS * BLOCK_SIZE]) != 0


@triton.jit
def _shift(most):
    """Returns the shift to subtract from a row's logits before exp; 0 if all logits are -inf."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def _softmax_parts(logits, shift):
    """Returns exp(logits - shift), and the sum of each row, to divide by: 1 if the sum is 0."""
    parts = libdevice.fast_expf(logits - shift[:, None])
    total = tl.sum(parts, 1)
    return parts, tl.where(total == 0.0, 1.0, total)


@triton.jit
def _normalized(taken, known, SCORE: tl.constexpr):
    """Returns the chosen scores divided by their sum, and for "none" the sum.

    Other scores are divided as a softmax of their logarithms, so that small scores do not
    underflow. The second result is then the softmax's sum, a multiple of the scores' sum.
    """
    if SCORE == "none":
        taken = tl.where(known, _score(taken, SCORE), 0.0)
        total = tl.sum(taken, 1)
        return taken / tl.where(total == 0.0, 1.0, total)[:, None], total
    logs = taken
    if SCORE == "sigmoid":
        logs = tl.minimum(taken, 0.0) - libdevice.log1p(tl.exp(-tl.abs(taken)))
    elif SCORE == "sqrtsoftplus":
        logs = 0.5 * _log_softplus(taken)
    parts, total = _softmax_parts(logs, _shift(tl.max(logs, 1)))
    return parts / total[:, None], total


@triton.jit
def _score(logits, SCORE: tl.constexpr):
    """Returns each logit's score, for scores that do not depend on other logits."""
    if SCORE == "sigmoid":
        return _sigmoid(logits)
    elif SCORE == "sqrtsoftplus":
        return tl.exp(0.5 * _log_softplus(logits))
    else:
        tl.static_assert(SCORE == "none", "unknown score")
        return tl.where(logits == float("-inf"), 0.0, logits)  # padding is -inf


@triton.jit
def _log_slope(logits, SCORE: tl.constexpr):
    """Returns the derivative of the logarithm of each logit's score."""
    if SCORE == "sigmoid":
        return _sigmoid(-logits)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus", "unknown score")
        softplus = tl.maximum(logits, 0.0) + libdevice.log1p(tl.exp(-tl.abs(logits)))
        return tl.where(logits < _FLAT, 0.5, 0.5 * _sigmoid(logits) / softplus)


@triton.jit
def _order_of_scores(logits, shift, total, bias_ptr, expert, known, SCORE: tl.constexpr):
    """Returns the order of each logit's score, plus its expert's bias if there is one."""
    if SCORE == "softmax":
        scores = libdevice.fast_dividef(_softmax_parts(logits, shift)[0], total[:, None])
    elif SCORE == "sigmoid":
        scores = libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-logits))
    else:
        scores = _score(logits, SCORE)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)
        scores += bias[None, :]
    return _order(_choosable(scores))


@triton.jit
def _sigmoid(logits):
    return 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def _log_softplus(logits):
    """Returns log(log(1 + exp(logits))), which far below zero is the logit."""
    softplus = tl.maximum(logits, 0.0) + libdevice.log1p(tl.exp(-tl.abs(logits)))
    return tl.where(logits < _FLAT, logits, tl.log(softplus))


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    num_tokens,
    scale,
    weights_ptr,
    experts_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_BY_LOGITS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BITS: tl.constexpr,
):
    SOFTMAX: tl.constexpr = SCORE == "softmax"
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    BLOCK: tl.constexpr = BLOCK_GROUPS * BLOCK_SIZE
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    place = tl.arange(0, BLOCK)
    expert = place
    known = place < NUM_EXPERTS
    if BLOCK_GROUPS > 1 and BLOCK_SIZE != GROUP_SIZE:  # groups begin at multiples of a power of two
        expert = place // BLOCK_SIZE * GROUP_SIZE + place % BLOCK_SIZE
        known = (place % BLOCK_SIZE < GROUP_SIZE) & (place // BLOCK_SIZE < NUM_GROUPS)
    at = logits_ptr + token[:, None] * NUM_EXPERTS + expert[None, :]
    mask = inside[:, None] & known[None, :]
    logits = _widened(tl.load(at, mask=mask, other=float("-inf")))
    place = tl.broadcast_to(place[None, :], [BLOCK_TOKENS, BLOCK])
    eligible = tl.broadcast_to(known[None, :], [BLOCK_TOKENS, BLOCK])

    order = _order(logits)
    BY_SCORE: tl.constexpr = bias_ptr is not None or (NUM_GROUPS > 1 and not GROUP_BY_LOGITS)
    shift = tl.zeros([BLOCK_TOKENS], tl.float32)
    total = tl.zeros([BLOCK_TOKENS], tl.float32)
    if SOFTMAX and (BY_SCORE or not NORMALIZE):
        shift = _shift(_value(tl.max(order, 1)))
        total = _softmax_parts(logits, shift)[1]
    by_score = order
    if BY_SCORE:
        by_score = _order_of_scores(logits, shift, total, bias_ptr, expert, known, SCORE)
    if NUM_GROUPS > 1:
        eligible &= _kept_groups(
            by_score, eligible, NUM_GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK_GROUPS, BLOCK_SIZE
        )
    if bias_ptr is not None:
        order = by_score
    MORE: tl.constexpr = TOP_K < NUM_EXPERTS
    chosen, alike = _choose(order, place, eligible, TOP_K, BLOCK_SLOTS, BITS, MORE)
    if not EXACT:
        if alike:
            # Logits and orders are computed again: keeping them would take too many registers.
            logits = _widened(tl.load(at, mask=mask, other=float("-inf")))
            order = _order(logits)
            if bias_ptr is not None:
                order = _order_of_scores(logits, shift, total, bias_ptr, expert, known, SCORE)
            # The floats' low bits, flipped back if negative: zero for logits rounded to bfloat16.
            left_out = (order ^ (order >> 31)) & ((2 << BITS) - 1)
            if tl.max(tl.max(left_out, 1), 0) != 0:
                chosen = _choose_by_all_bits(order, place, eligible, TOP_K, BLOCK_SLOTS)
    if BLOCK_GROUPS > 1 and BLOCK_SIZE != GROUP_SIZE:
        chosen = chosen // BLOCK_SIZE * GROUP_SIZE + chosen % BLOCK_SIZE

    slot = tl.arange(0, BLOCK_SLOTS)[None, :]
    mask = inside[:, None] & (slot < TOP_K)
    at = logits_ptr + token[:, None] * NUM_EXPERTS + chosen
    taken = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    if NORMALIZE:
        weights, _ = _normalized(taken, mask, SCORE)
    elif SOFTMAX:
        weights = tl.exp(taken - shift[:, None]) / total[:, None]
    else:
        weights = _score(taken, SCORE)
    out = token[:, None] * TOP_K + slot
    tl.store(weights_ptr + out, weights * scale, mask=mask)
    tl.store(experts_ptr + out, chosen, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_grad_kernel(
    logits_ptr,
    experts_ptr,
    gradient_ptr,
    num_tokens,
    scale,
    d_logits_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    SOFTMAX: tl.constexpr = SCORE == "softmax"
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    slot = tl.arange(0, BLOCK_SLOTS)[None, :]
    routed = inside[:, None] & (slot < TOP_K)
    out = token[:, None] * TOP_K + slot
    chosen = tl.load(experts_ptr + out, mask=routed, other=0)
    gradient = tl.load(gradient_ptr + out, mask=routed, other=0.0)
    at = token[:, None] * NUM_EXPERTS + chosen
    taken = tl.load(logits_ptr + at, mask=routed, other=float("-inf")).to(tl.float32)

    expert = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (expert < NUM_EXPERTS)
    everywhere = token[:, None] * NUM_EXPERTS + expert
    rest = tl.zeros([BLOCK_TOKENS, BLOCK], tl.float32)
    if NORMALIZE:
        scores, total = _normalized(taken, routed, SCORE)
        # The mean gradient, weighted by scores. Empty slots have the logit -inf: they add nothing.
        mean = tl.sum(tl.where(routed, gradient * scores, 0.0), 1)
        if SCORE == "none":
            mean = tl.where(total == 0.0, 0.0, mean)
            scores = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
        gradient -= mean[:, None]
    elif SOFTMAX:
        logits = tl.load(logits_ptr + everywhere, mask=mask, other=float("-inf")).to(tl.float32)
        shift = _shift(_value(tl.max(_order(logits), 1)))
        parts, total = _softmax_parts(logits, shift)
        scores = tl.exp(taken - shift[:, None]) / total[:, None]
        mean = tl.sum(gradient * scores, 1)
        rest = parts * (-scale * mean / total)[:, None]
        gradient -= mean[:, None]
    elif SCORE == "none":
        scores = 1.0
    else:
        scores = _score(taken, SCORE)
    d_taken = scale * scores * gradient
    if SCORE == "sigmoid" or SCORE == "sqrtsoftplus":
        d_taken *= _log_slope(taken, SCORE)
    elif SCORE == "none":
        d_taken = tl.where(taken == float("-inf"), 0.0, d_taken)
    dtype = d_logits_ptr.dtype.element_ty
    tl.store(d_logits_ptr + everywhere, rest.to(dtype), mask=mask)
    tl.debug_barrier()  # the gradients of the chosen logits overwrite some of `rest`
    tl.store(d_logits_ptr + at, d_taken.to(dtype), mask=routed)
