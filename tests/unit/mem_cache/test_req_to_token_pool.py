"""The request table's rows."""

import numpy as np
import pytest

from pdserve.mem_cache.errors import DoubleFree, InvalidFree
from pdserve.mem_cache.req_to_token_pool import ReqToTokenPool


def test_rows_go_out_once_and_come_back():
    pool = ReqToTokenPool(max_reqs=3, context_len=8)
    assert pool.table.shape == (3, 8)
    assert pool.table.dtype == np.int32
    assert [pool.alloc() for _ in range(4)] == [0, 1, 2, None]
    pool.free(1)
    assert pool.available_size() == 1
    assert pool.rows_in_use() == {0, 2}
    assert pool.alloc() == 1


@pytest.mark.parametrize(("row", "error"), [(1, DoubleFree), (2, InvalidFree), (-1, InvalidFree)])
def test_a_refused_free_changes_nothing(row, error):
    pool = ReqToTokenPool(max_reqs=2, context_len=8)
    pool.alloc()
    with pytest.raises(error):
        pool.free(row)
    assert pool.available_size() == 1
    assert pool.rows_in_use() == {0}
