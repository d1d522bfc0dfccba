# SPDX-License-Identifier: Apache-2.0
# The source of boot_sector.py.
.code16
.intel_syntax noprefix
.globl _start
.org 0
_start:
  cli
  xor ax, ax
  mov ds, ax
  mov ss, ax
  mov sp, 0x7c00
  cld
  # the power button sets a bit of the status
  mov dx, 0x602
  mov ax, 0x0100
  out dx, ax
  # 115200 8n1, FIFO
  mov dx, 0x3fa
  mov al, 0xc7
  out dx, al
  mov si, 0x7c00 + (hello - _start)
1:
  lodsb
  test al, al
  jz command
  call put
  jmp 1b
command:
  mov dx, 0x600
  in ax, dx
  test ah, 1
  jnz off
  mov dx, 0x3fd
  in al, dx
  test al, 1
  jnz 6f
  sti
  hlt
  jmp command
6:
  mov dx, 0x3f8
  in al, dx
  cmp al, 'O'
  je off
  cmp al, 'R'
  je reset
  cmp al, 'P'
  je panic
  cmp al, 'F'
  je flood
  cmp al, 'L'
  je later
  cmp al, 'H'
  je deaf
  call put
  jmp command
later:
  call put
  # about two seconds of the BIOS' clock
  sti
  mov cx, 36
2:
  hlt
  loop 2b
off:
  mov si, 0x7c00 + (bye - _start)
3:
  lodsb
  test al, al
  jz 4f
  call put
  jmp 3b
4:
  mov dx, 0x604
  mov ax, 0x2000
  out dx, ax
halt:
  hlt
  jmp halt
deaf:
  call put
  jmp halt
reset:
  mov dx, 0xcf9
  mov al, 6
  out dx, al
  jmp halt
panic:
  mov dx, 0x505
  mov al, 1
  out dx, al
  jmp halt
flood:
  mov al, 'x'
  call put
  jmp flood
put:
  push ax
  mov dx, 0x3fd
5:
  in al, dx
  test al, 0x20
  jz 5b
  pop ax
  mov dx, 0x3f8
  out dx, al
  ret
hello: .asciz "hello\r\n"
bye: .asciz "bye\r\n"
