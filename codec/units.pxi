# Included by _codec.pyx: units (the packets' view of a cache block) cut into symbols. A symbol is the unit header (4 bytes,
# big endian: unit id << 8 | fragment) and symbol_size - 4 bytes of the unit; the last one of a unit is padded with zeros.


def scatter_unit(run, first, unit, body, tail=b""):
    cdef Py_buffer into, data, rest
    cdef uint64_t at = integer(first, "first", 0, PFEC_MAX_CAPACITY)
    cdef uint32_t number = <uint32_t>integer(unit, "unit", 0, 0xFFFFFF)
    try:
        PyObject_GetBuffer(run, &into, PyBUF_STRIDES | PyBUF_WRITABLE)
    except BufferError as error:
        raise ValueError(f"cannot be written to: {error}") from None
    try:
        PyObject_GetBuffer(body, &data, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(tail, &rest, PyBUF_SIMPLE)
            try:
                return scatter(&into, at, number, &data, &rest)
            finally:
                PyBuffer_Release(&rest)
        finally:
            PyBuffer_Release(&data)
    finally:
        PyBuffer_Release(&into)


cdef size_t scatter(Py_buffer *into, uint64_t first, uint32_t unit, Py_buffer *body, Py_buffer *tail) except 0:
    """Returns the number of symbols written."""
    cdef size_t size, payload, head = <size_t>body.len, total = <size_t>(body.len + tail.len), count, i, start, n, part
    cdef uint8_t *slot
    if into.ndim != 2 or into.itemsize != 1 or into.strides[1] != 1 or into.strides[0] < into.shape[1]:
        raise ValueError("symbols are the rows of a two-dimensional array of bytes")
    size = <size_t>into.shape[1]
    if size <= UNIT_HEADER:
        raise ValueError("symbols without room behind the unit header")
    payload = size - UNIT_HEADER
    count = (total + payload - 1) // payload
    if count < 1 or count > MAX_FRAGMENTS:
        raise ValueError(f"a unit of {total} bytes does not make 1 to {MAX_FRAGMENTS} symbols of {size}")
    if first + count > <uint64_t>into.shape[0]:
        raise ValueError(f"{count} symbols from {first} on do not fit {into.shape[0]}")
    for i in range(count):
        slot = <uint8_t *>into.buf + (first + i) * <size_t>into.strides[0]
        slot[0] = <uint8_t>(unit >> 16)
        slot[1] = <uint8_t>(unit >> 8)
        slot[2] = <uint8_t>unit
        slot[3] = <uint8_t>i
        slot += UNIT_HEADER
        start = i * payload
        n = min(payload, total - start)
        part = 0 if start >= head else min(n, head - start)
        memcpy(slot, <uint8_t *>body.buf + start, part)
        if part < n:
            memcpy(slot + part, <uint8_t *>tail.buf + (start + part - head), n - part)
        memset(slot + n, 0, payload - n)
    return count
