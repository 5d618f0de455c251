/* The module `_codec`, and what its files share. */

#define IMPORTS_NUMPY
#include "codec.h"

PyObject *name_fast, *name_infos, *name_metadata, *name_final_obs, *name_reset_info, *time_monotonic, *defaultdict;
PyArray_Descr *int64_dtype, *double_dtype;

static PyMethodDef functions[] = {
    {"keep", keep_sizes, METH_VARARGS, keep_doc},
#ifdef __linux__
    {"try_for", try_for, METH_VARARGS, try_for_doc},
    {"exchange", exchange, METH_VARARGS, exchange_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_codec", "The compiled fast path of records; see `codec.py`.", -1,
    functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__codec(void) {
    import_array();
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL) return NULL;
    time_monotonic = PyObject_GetAttrString(time, "monotonic");
    Py_DECREF(time);
    PyObject *collections = PyImport_ImportModule("collections");
    if (collections == NULL) return NULL;
    defaultdict = PyObject_GetAttrString(collections, "defaultdict");
    Py_DECREF(collections);
#ifdef __linux__
    find_clock_wait();
#endif
    if (prepare_memory() < 0) return NULL;
    name_fast = PyUnicode_InternFromString("fast");
    name_infos = PyUnicode_InternFromString("infos");
    name_metadata = PyUnicode_InternFromString("metadata");
    name_final_obs = PyUnicode_InternFromString("final_obs");
    name_reset_info = PyUnicode_InternFromString("reset_info");
    int64_dtype = PyArray_DescrFromType(NPY_INT64);
    double_dtype = PyArray_DescrFromType(NPY_DOUBLE);
    if (time_monotonic == NULL || defaultdict == NULL || name_fast == NULL || name_infos == NULL ||
        name_metadata == NULL || name_final_obs == NULL || name_reset_info == NULL)
        return NULL;
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&codec_spec);
    if (module == NULL || type == NULL || PyModule_AddIntConstant(module, "LARGE", LARGE) < 0 ||
        PyModule_AddObject(module, "Codec", type) < 0) {
        Py_XDECREF(module);
        Py_XDECREF(type);
        return NULL;
    }
    return module;
}
