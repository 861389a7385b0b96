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
        .section .note.GNU-stack, "", @progbits
        .text

#if defined(__x86_64__)
stub_tail:                      /* entered by call: the return address lies just behind the stub */
        pop     %rdi
        sub     $8, %rsp        /* calls want the stack at 16 bytes; the caller's return address is at its top */
        call    sim_stub_called
        add     $8, %rsp
        ret

        .macro  call_tail
        call    stub_tail
        .endm
        .macro  answer_success
        xor     %eax, %eax
        .endm
        .macro  answer_text
        lea     stub_text(%rip), %rax
        .endm
#elif defined(__aarch64__)
stub_tail:                      /* x9: the caller's return address; x30: just behind the stub */
        stp     x29, x9, [sp, #-16]!
        mov     x29, sp
        mov     x0, x30
        bl      sim_stub_called
        ldp     x29, x30, [sp], #16
        ret

        .macro  call_tail
        mov     x9, x30
        bl      stub_tail
        .endm
        .macro  answer_success
        mov     w0, #0
        .endm
        .macro  answer_text
        adrp    x0, stub_text
        add     x0, x0, :lo12:stub_text
        .endm
#else
#error "library_stub.S has no call sequence for this machine"
#endif

        .macro  stub_begin name
        .globl  \name
        .type   \name, @function
\name:
        .endm

        .macro  not_supported name
        stub_begin \name
        call_tail
        .size   \name, . - \name
        .endm

        .macro  does_nothing name
        stub_begin \name
        answer_success
        ret
        .size   \name, . - \name
        .endm

        .macro  says name
        stub_begin \name
        answer_text
        ret
        .size   \name, . - \name
        .endm

stub_text:
        .asciz  "simulated library: not supported"
        .balign 4
