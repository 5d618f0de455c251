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

/* Import an attribute of a module, unless an earlier try has done so. */
static int import_once(const char *module_name, const char *name, PyObject **attribute) {
    if (*attribute != NULL) return 0;
    PyObject *module = PyImport_ImportModule(module_name);
    if (module != NULL) *attribute = PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return *attribute == NULL ? -1 : 0;
}

static int make_name(const char *text, PyObject **name) {
    if (*name == NULL) *name = PyUnicode_InternFromString(text);
    return *name == NULL ? -1 : 0;
}

PyMODINIT_FUNC PyInit__codec(void) {
    import_array();
#ifdef __linux__
    find_clock_wait();
#endif
    if (import_once("time", "monotonic", &time_monotonic) < 0 ||
        import_once("collections", "defaultdict", &defaultdict) < 0 || prepare_memory() < 0 ||
        make_name("fast", &name_fast) < 0 || make_name("infos", &name_infos) < 0 ||
        make_name("metadata", &name_metadata) < 0 || make_name("final_obs", &name_final_obs) < 0 ||
        make_name("reset_info", &name_reset_info) < 0)
        return NULL;
    int64_dtype = PyArray_DescrFromType(NPY_INT64);
    double_dtype = PyArray_DescrFromType(NPY_DOUBLE);
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&codec_spec);
    if (module != NULL && type == NULL && !PyErr_Occurred()) PyErr_NoMemory(); /* CPython 3.11 sets no error */
    if (type == NULL || PyModule_AddIntConstant(module, "LARGE", LARGE) < 0 ||
        PyModule_AddObject(module, "Codec", type) < 0) {
        Py_XDECREF(module);
        Py_XDECREF(type);
        return NULL;
    }
    return module;
}
