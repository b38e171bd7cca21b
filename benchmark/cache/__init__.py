"""``pdserve bench cache``: the prefix tree, the queue and the allocator by themselves."""
