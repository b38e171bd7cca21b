"""Owners of KV slots: the page allocator, the request table and the prefix caches. Host data only, no tensors."""
