"""What becomes of a request when a worker fails: every fault, in every phase of the request, on real processes."""
