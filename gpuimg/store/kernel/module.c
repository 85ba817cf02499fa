/*
 * The compiled part of the store: what would be slow in the interpreter. gpuimg/store/planes.py does the same
 * without it, and tests hold the two equal.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdlib.h>

#include "looks.h"
#include "pages.h"
#include "planes.h"

/* Two MiB is the longest chunk of the format. */
enum { LONGEST = 2 * 1024 * 1024 };

/* Memory that a thread keeps for its work until it ends. */
typedef struct {
    size_t size;
    uint8_t bytes[];
} kept_memory;

static pthread_key_t scratch_key;

static uint8_t *thread_scratch(size_t size)
{
    kept_memory *kept = pthread_getspecific(scratch_key);
    if (!kept || kept->size < size) {
        free(kept);
        kept = malloc(sizeof *kept + size);
        if (kept)
            kept->size = size;
        pthread_setspecific(scratch_key, kept);
    }
    return kept ? kept->bytes : NULL;
}

typedef struct {
    Py_buffer data, base;
    int has_base;
    unsigned width, transform;
} task;

static void release(task *held)
{
    PyBuffer_Release(&held->data);
    if (held->has_base)
        PyBuffer_Release(&held->base);
}

/* Parses (data, element_size, transform, base); on success the buffers are held. */
static int parse_task(PyObject *arguments, task *held)
{
    PyObject *base;
    if (!PyArg_ParseTuple(arguments, "y*IIO", &held->data, &held->width, &held->transform, &base))
        return 0;
    held->has_base = base != Py_None;
    if (held->has_base && PyObject_GetBuffer(base, &held->base, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&held->data);
        return 0;
    }
    int fits = (held->width == 1 || held->width == 2 || held->width == 4 || held->width == 8) &&
               held->transform < TRANSFORMS && (held->transform >= DIFFERENCE) == held->has_base &&
               held->data.len <= LONGEST && (!held->has_base || held->base.len == held->data.len);
    if (!fits) {
        release(held);
        PyErr_SetString(PyExc_ValueError, "no such element size, transform or length");
    }
    return fits;
}

static PyObject *encode_planes(PyObject *self, PyObject *arguments)
{
    (void)self;
    task held;
    if (!parse_task(arguments, &held))
        return NULL;
    size_t size = (size_t)held.data.len, length = 0;
    uint8_t *scratch = thread_scratch(planes_scratch(size));
    PyObject *result = NULL;
    if (scratch)
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)planes_bound(size, held.width));
    if (result) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(result);
        Py_BEGIN_ALLOW_THREADS;
        length = planes_encode(held.data.buf, held.has_base ? held.base.buf : NULL, size, held.width,
                               held.transform, scratch, out);
        Py_END_ALLOW_THREADS;
        if (length) {
            _PyBytes_Resize(&result, (Py_ssize_t)length);
        } else {
            Py_DECREF(result);
            result = Py_NewRef(Py_None);
        }
    }
    release(&held);
    return result || PyErr_Occurred() ? result : PyErr_NoMemory();
}

static PyObject *estimate_planes(PyObject *self, PyObject *arguments)
{
    (void)self;
    task held;
    if (!parse_task(arguments, &held))
        return NULL;
    size_t size = (size_t)held.data.len;
    uint8_t *memory = thread_scratch(planes_scratch(size));
    double estimate = 0;
    if (memory) {
        Py_BEGIN_ALLOW_THREADS;
        estimate = planes_estimate(held.data.buf, held.has_base ? held.base.buf : NULL, size, held.width,
                                   held.transform, memory);
        Py_END_ALLOW_THREADS;
    }
    release(&held);
    return memory ? PyFloat_FromDouble(estimate) : PyErr_NoMemory();
}

static PyObject *decode_planes(PyObject *self, PyObject *arguments)
{
    (void)self;
    Py_buffer payload, target, base_buffer;
    PyObject *base;
    unsigned width;
    if (!PyArg_ParseTuple(arguments, "y*w*IO", &payload, &target, &width, &base))
        return NULL;
    int has_base = base != Py_None, decoded = 0, failed = 0;
    if (has_base && PyObject_GetBuffer(base, &base_buffer, PyBUF_SIMPLE) < 0) {
        has_base = 0;
        failed = 1;
    }
    size_t size = (size_t)target.len;
    if (!failed && (width == 1 || width == 2 || width == 4 || width == 8) && target.len <= LONGEST &&
        (!has_base || base_buffer.len == target.len)) {
        uint8_t *scratch = thread_scratch(planes_scratch(size));
        if (scratch) {
            Py_BEGIN_ALLOW_THREADS;
            decoded = planes_decode(payload.buf, (size_t)payload.len, has_base ? base_buffer.buf : NULL, width,
                                    scratch, target.buf, size);
            Py_END_ALLOW_THREADS;
        } else {
            PyErr_NoMemory();
            failed = 1;
        }
    }
    PyBuffer_Release(&payload);
    PyBuffer_Release(&target);
    if (has_base)
        PyBuffer_Release(&base_buffer);
    return failed ? NULL : PyBool_FromLong(decoded);
}

static PyObject *zero(PyObject *self, PyObject *argument)
{
    (void)self;
    Py_buffer data;
    int found;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    found = is_zero(data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    return PyBool_FromLong(found);
}

static PyObject *repeats(PyObject *self, PyObject *argument)
{
    (void)self;
    Py_buffer data;
    double share;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    share = share_of_repeats(data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    return PyFloat_FromDouble(share);
}

static PyObject *random_looking(PyObject *self, PyObject *argument)
{
    (void)self;
    Py_buffer data;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    int found = looks_random(data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyBool_FromLong(found);
}

static PyObject *list_cuts(const cut *cuts, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = Py_BuildValue("nnO", (Py_ssize_t)cuts[i].offset, (Py_ssize_t)cuts[i].length,
                                       cuts[i].zero ? Py_True : Py_False);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *cut_pages(PyObject *self, PyObject *arguments)
{
    (void)self;
    Py_buffer data;
    int last, inside;
    if (!PyArg_ParseTuple(arguments, "y*pp", &data, &last, &inside))
        return NULL;
    size_t size = (size_t)data.len, count = 0, covered = 0;
    cut *cuts = malloc(pages_most_cuts(size) * sizeof *cuts);
    uint8_t *scratch = malloc(size / PAGE + 1);
    PyObject *result = NULL;
    if (cuts && scratch) {
        Py_BEGIN_ALLOW_THREADS;
        count = pages_cut(data.buf, size, last, &inside, scratch, cuts, &covered);
        Py_END_ALLOW_THREADS;
        PyObject *list = list_cuts(cuts, count);
        if (list)
            result = Py_BuildValue("NnO", list, (Py_ssize_t)covered, inside ? Py_True : Py_False);
    } else {
        PyErr_NoMemory();
    }
    free(cuts);
    free(scratch);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"is_zero", zero, METH_O, NULL},
    {"repeats", repeats, METH_O, NULL},
    {"looks_random", random_looking, METH_O, NULL},
    {"cut_pages", cut_pages, METH_VARARGS, NULL},
    {"encode_planes", encode_planes, METH_VARARGS, NULL},
    {"decode_planes", decode_planes, METH_VARARGS, NULL},
    {"estimate_planes", estimate_planes, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void)
{
    if (pthread_key_create(&scratch_key, free))
        return PyErr_NoMemory();
    return PyModule_Create(&module);
}
