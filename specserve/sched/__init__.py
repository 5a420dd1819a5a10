"""Which requests compute which tokens in each step: continuous batching with chunked prefill."""
