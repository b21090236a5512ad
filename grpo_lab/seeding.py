"""Every random choice is derived from (run seed, purpose, indices). No generator state is carried or saved."""

import hashlib

_MASK_63 = (1 << 63) - 1


def derive_seed(run_seed: int, purpose: str, *indices: int | str) -> int:
    """A seed in [0, 2**63): the first 8 bytes of BLAKE2b over the arguments. Distinct arguments give unrelated seeds."""
    key = "\x1f".join([str(run_seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") & _MASK_63
