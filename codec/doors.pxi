# Included by _codec.pyx: doors for the tests of the kernels.


def _multiply(unsigned char a, unsigned char b):
    return gf256_mul[a][b]


def _inverse(unsigned char a):
    return gf256_inv[a]


cdef const gf256_kernels *tested_level(str name, size_t n) except NULL:
    cdef const gf256_kernels *level = find_level(name)
    if level == NULL:
        raise ValueError(f"no level {name!r}")
    if n % GF256_BLOCK != 0:
        raise ValueError(f"length {n} is not a multiple of {GF256_BLOCK}")
    return level


def _axpy(str level, unsigned char[::1] y, const unsigned char[::1] x, unsigned char c):
    if x.shape[0] != y.shape[0]:
        raise ValueError("lengths differ")
    cdef const gf256_kernels *kernels = tested_level(level, <size_t>y.shape[0])
    if y.shape[0] != 0:
        kernels.axpy(&y[0], &x[0], c, <size_t>y.shape[0])


def _scal(str level, unsigned char[::1] y, unsigned char c):
    cdef const gf256_kernels *kernels = tested_level(level, <size_t>y.shape[0])
    if y.shape[0] != 0:
        kernels.scal(&y[0], c, <size_t>y.shape[0])


def _dot(str level, unsigned char[::1] y, list sources, bytes coefficients):
    cdef const gf256_kernels *kernels = tested_level(level, <size_t>y.shape[0])
    cdef const unsigned char[::1] x
    cdef size_t i, k = len(sources)
    if k != <size_t>len(coefficients):
        raise ValueError("one coefficient a source")
    if y.shape[0] == 0:
        return
    cdef const uint8_t **operands = <const uint8_t **>calloc(k + 1, sizeof(uint8_t *))
    if operands == NULL:
        raise MemoryError
    try:
        for i in range(k):
            x = sources[i]  # `sources` keeps the buffer alive
            if x.shape[0] != y.shape[0]:
                raise ValueError("lengths differ")
            operands[i] = &x[0]
        kernels.dot(&y[0], operands, <const uint8_t *>PyBytes_AS_STRING(coefficients), k, <size_t>y.shape[0])
    finally:
        free(operands)
