"""The drop step of a token that stays."""

# larger than any position
NEVER = 2**31 - 1
