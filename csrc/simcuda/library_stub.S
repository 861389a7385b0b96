/* The functions a simulated library lists but does not implement. build_libraries.py writes one file a library that
 * includes this one and then names them:
 *
 *     not_supported NAME     answers SIM_NOT_SUPPORTED and is remembered by name
 *     does_nothing  NAME     answers 0, the success status of every library: products, setters
 *     says          NAME     answers a string: the status-to-text functions
 *
 * A stub must be small, because there are 6,000 a set: it is one call to a shared tail, and its own address (the return
 * address) is what identifies it, looked up in the dynamic symbol table when it is called. No table of names, no
 * relocations. All arguments are ignored, so any C signature fits, variadic ones too.
 */
#ifndef __x86_64__
#error "the simulated CUDA libraries are built for x86-64 only so far: library_stub.S needs this machine's call sequence"
#endif

        .section .note.GNU-stack, "", @progbits
        .text

stub_tail:                      /* entered by call: the return address lies just behind the stub */
        pop     %rdi
        sub     $8, %rsp        /* calls want the stack at 16 bytes; the caller's return address is at its top */
        call    sim_stub_called
        add     $8, %rsp
        ret

        .macro  stub_begin name
        .globl  \name
        .type   \name, @function
\name:
        .endm

        .macro  not_supported name
        stub_begin \name
        call    stub_tail
        .size   \name, . - \name
        .endm

        .macro  does_nothing name
        stub_begin \name
        xor     %eax, %eax
        ret
        .size   \name, . - \name
        .endm

        .macro  says name
        stub_begin \name
        lea     stub_text(%rip), %rax
        ret
        .size   \name, . - \name
        .endm

stub_text:
        .asciz  "simulated library: not supported"
