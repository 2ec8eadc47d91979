"""Is an arena in order?"""


def check_arena(arena, tables):
    """Every byte of every chunk is in one extent or in one gap, and every extent has one owner."""
    owned = {id(extent): extent for table in tables for extent in table._extents if extent}
    assert len(owned) == sum(e is not None for table in tables for e in table._extents)
    found = {id(extent) for extent in arena}
    assert found == owned.keys()
    assert arena.held == sum(chunk.size for chunk in arena.chunks)
    assert arena.used == sum(extent.size for extent in arena)
    assert arena.budget is None or arena.held <= arena.budget
    for chunk in arena.chunks:
        assert chunk.used == sum(extent.size for extent in chunk.extents.values())
        assert chunk.used, "a chunk without extents is given back"
        spans = [(offset, extent.size) for offset, extent in chunk.extents.items()]
        assert all(extent.offset == offset for offset, extent in chunk.extents.items())
        assert all(extent.chunk is chunk for extent in chunk.extents.values())
        end, gap_before = 0, False
        gaps = set(chunk.gaps)
        for offset, size in sorted(spans + chunk.gaps):
            assert offset == end
            assert offset % 64 == 0
            is_gap = (offset, size) in gaps
            assert not (is_gap and gap_before), "two gaps side by side"
            end, gap_before = offset + size, is_gap
        assert end == chunk.size
    for table in tables:
        for b, extent in enumerate(table._extents):
            where = table._where[b]
            capacity = int(where[-1])
            if extent is None:
                assert capacity == 0
            else:
                assert where.tolist() == table.layout.places(extent.address, capacity).tolist()
                assert table.layout.nbytes(capacity) <= extent.size
