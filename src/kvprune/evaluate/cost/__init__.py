"""FLOPs and cache bytes by formula."""
